package persisting.spark;

import java.util.Arrays;
import java.util.HashMap;
import java.util.HashSet;
import java.util.Map;
import java.util.Set;
import org.apache.spark.sql.connector.catalog.MetadataColumn;
import org.apache.spark.sql.connector.catalog.SupportsMetadataColumns;
import org.apache.spark.sql.connector.catalog.SupportsWrite;
import org.apache.spark.sql.connector.catalog.TableCapability;
import org.apache.spark.sql.connector.read.ScanBuilder;
import org.apache.spark.sql.connector.write.LogicalWriteInfo;
import org.apache.spark.sql.connector.write.LogicalWriteInfoImpl;
import org.apache.spark.sql.connector.write.WriteBuilder;
import org.apache.spark.sql.execution.datasources.v2.python.PythonDataSourceV2;
import org.apache.spark.sql.execution.datasources.v2.python.PythonWriteBuilder;
import org.apache.spark.sql.types.DataType;
import org.apache.spark.sql.types.StructField;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.util.CaseInsensitiveStringMap;

/** A topic that a catalog found by its name. Where and which version it is, are options of every scan and write. */
public class CatalogTopic extends TopicTable implements SupportsWrite, SupportsMetadataColumns {
  private static final Set METADATA = new HashSet(Arrays.asList(new Object[] {"_bucket", "_offset", "_time"}));

  private final String title;
  private final Map place;
  private final Map version;
  private final StructType readable;
  private final boolean metadata;

  private CatalogTopic(String title, Map place, Map version, PythonDataSourceV2 source, StructType schema,
      StructType readable, boolean metadata) {
    super(source, schema, capabilities(version.isEmpty()));
    this.title = title;
    this.place = place;
    this.version = version;
    this.readable = readable;
    this.metadata = metadata;
  }

  /** Opens a topic, with the columns of metadata unless it has fields of these names. */
  static CatalogTopic open(String title, Map place, Map version) {
    try {
      return open(title, place, version, true);
    } catch (Exception error) {
      if (String.valueOf(error.getMessage()).indexOf("includeMetadata") < 0) {
        throw rethrown(error);
      }
      return open(title, place, version, false);
    }
  }

  private static CatalogTopic open(String title, Map place, Map version, boolean metadata) {
    PythonDataSourceV2 source = newSource();
    StructType readable = source.inferSchema(options(place, version, metadata, null));
    return new CatalogTopic(title, place, version, source, fields(readable, metadata), readable, metadata);
  }

  /** The same error, with the line of it that says why, if it is one of ours. */
  private static RuntimeException rethrown(Exception error) {
    String text = String.valueOf(error.getMessage());
    int start = text.lastIndexOf("persisting.errors.");
    if (start < 0) {
      return error instanceof RuntimeException ? (RuntimeException) error : new RuntimeException(error);
    }
    int end = text.indexOf('\n', start);
    return new IllegalArgumentException(end < 0 ? text.substring(start) : text.substring(start, end), error);
  }

  /** The schema that Python gives for these options. */
  static StructType schemaOf(Map options) {
    try {
      return newSource().inferSchema(new CaseInsensitiveStringMap(options));
    } catch (Exception error) {
      throw rethrown(error);
    }
  }

  static PythonDataSourceV2 newSource() {
    PythonDataSourceV2 source = new PythonDataSourceV2();
    source.setShortName(TopicRelations.FORMAT);
    return source;
  }

  private static CaseInsensitiveStringMap options(Map place, Map version, boolean metadata, Map given) {
    Map all = new HashMap(place);
    all.putAll(version);
    if (metadata) {
      all.put("includeMetadata", "true");
    }
    if (given != null) {
      all.putAll(given);
    }
    return new CaseInsensitiveStringMap(all);
  }

  private static StructType fields(StructType readable, boolean metadata) {
    java.util.List fields = new java.util.ArrayList();
    for (int number = 0; number < readable.fields().length; number++) {
      if (!metadata || !METADATA.contains(readable.fields()[number].name())) {
        fields.add(readable.fields()[number]);
      }
    }
    return new StructType((StructField[]) fields.toArray(new StructField[0]));
  }

  private static Set capabilities(boolean writable) {
    Set found = new HashSet();
    found.add(TableCapability.BATCH_READ);
    if (writable) {
      found.add(TableCapability.MICRO_BATCH_READ);
      found.add(TableCapability.BATCH_WRITE);
      found.add(TableCapability.STREAMING_WRITE);
      found.add(TableCapability.TRUNCATE);
    }
    return found;
  }

  public String name() {
    return title;
  }

  StructType readable() {
    return readable;
  }

  public Map properties() {
    return new HashMap(place);
  }

  /** The same topic with a source of its own and these columns only. */
  CatalogTopic narrowedTo(StructType columns) {
    return new CatalogTopic(title, place, version, newSource(), columns, readable, metadata);
  }

  public ScanBuilder newScanBuilder(CaseInsensitiveStringMap given) {
    // A source keeps the options that it was first used with, which are those of the catalog.
    CatalogTopic table = given.isEmpty() ? this
        : narrowedTo(schema());
    return new TopicScanBuilder(table, options(place, version, metadata, given.asCaseSensitiveMap()));
  }

  public WriteBuilder newWriteBuilder(LogicalWriteInfo info) {
    CaseInsensitiveStringMap options = options(place, new HashMap(), false, info.options().asCaseSensitiveMap());
    LogicalWriteInfo located = new LogicalWriteInfoImpl(info.queryId(), info.schema(), options, info.rowIdSchema(),
        info.metadataSchema());
    return new PythonWriteBuilder(newSource(), TopicRelations.FORMAT, located);
  }

  public MetadataColumn[] metadataColumns() {
    if (!metadata) {
      return new MetadataColumn[0];
    }
    StructField[] all = readable.fields();
    java.util.List found = new java.util.ArrayList();
    for (int number = 0; number < all.length; number++) {
      if (METADATA.contains(all[number].name())) {
        found.add(new Place(all[number]));
      }
    }
    return (MetadataColumn[]) found.toArray(new MetadataColumn[0]);
  }

  static class Place implements MetadataColumn {
    private final StructField field;

    Place(StructField field) {
      this.field = field;
    }

    public String name() {
      return field.name();
    }

    public DataType dataType() {
      return field.dataType();
    }
  }
}
