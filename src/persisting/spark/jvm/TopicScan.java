package persisting.spark;

import com.fasterxml.jackson.databind.ObjectMapper;
import java.util.ArrayList;
import java.util.Base64;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.WeakHashMap;
import org.apache.spark.sql.connector.metric.CustomMetric;
import org.apache.spark.sql.connector.metric.CustomTaskMetric;
import org.apache.spark.sql.connector.read.Batch;
import org.apache.spark.sql.connector.read.Scan;
import org.apache.spark.sql.connector.read.streaming.MicroBatchStream;
import org.apache.spark.sql.execution.datasources.v2.python.PythonBatch;
import org.apache.spark.sql.execution.datasources.v2.python.PythonDataSourceReadInfo;
import org.apache.spark.sql.execution.datasources.v2.python.PythonDataSourceV2;
import org.apache.spark.sql.execution.datasources.v2.python.PythonScan;
import org.apache.spark.sql.internal.connector.SupportsMetadata;
import org.apache.spark.sql.sources.Filter;
import org.apache.spark.sql.types.DataTypes;
import org.apache.spark.sql.types.Metadata;
import org.apache.spark.sql.types.MetadataBuilder;
import org.apache.spark.sql.types.StructField;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.util.CaseInsensitiveStringMap;

/**
 * One scan of a topic, with a Python reader of its own. The reader gets its hints, the conditions and the rows to read, in the
 * metadata of the first field of its schema.
 */
public class TopicScan implements Scan, SupportsMetadata {
  static final String HINTS = "persisting.hints";
  /** The only column of a scan that needs none: its values are null, and nobody looks at them. */
  static final String ROWS = "_persisting_rows";
  /** A new one would examine the classes of all values anew. */
  private static final ObjectMapper JSON = new ObjectMapper();

  /** By load, the first partition that its first scan planned, which names all rows. Its later scans read the same rows. */
  private static final Map PLANNED = new WeakHashMap();

  private final TopicTable table;
  private final CaseInsensitiveStringMap options;
  private final StructType columns;
  private final List conditions;
  private final List shown;
  /** Null if the scan returns the rows themselves. */
  private final PartialAggregates aggregates;
  private Batch batch;

  TopicScan(TopicTable table, CaseInsensitiveStringMap options, StructType columns, List conditions, List shown,
      PartialAggregates aggregates) {
    this.table = table;
    this.options = options;
    this.columns = columns;
    this.conditions = conditions;
    this.shown = shown;
    this.aggregates = aggregates;
  }

  boolean canAggregate() {
    return aggregates == null && conditions.isEmpty() && table.isPrunable();
  }

  boolean hasConditions() {
    return aggregates == null && !conditions.isEmpty();
  }

  /** A scan of the same rows that returns aggregates of them. */
  TopicScan aggregatedBy(PartialAggregates aggregates) {
    return new TopicScan(table, options, columns, conditions, shown, aggregates);
  }

  TopicTable table() {
    return table;
  }

  public StructType readSchema() {
    return aggregates == null ? columns : aggregates.schema();
  }

  public String description() {
    if (aggregates != null) {
      return "(Python) aggregated: [" + String.join(", ", readSchema().fieldNames()) + "]";
    }
    return shown.isEmpty() ? "(Python)" : "(Python) pushed: " + shown;
  }

  public scala.collection.immutable.Map getMetaData() {
    scala.collection.immutable.Map data = template().getMetaData();
    data = (scala.collection.immutable.Map) data.updated("PushedFilters", shown.toString());
    return (scala.collection.immutable.Map) data.updated("ReadSchema", columns.simpleString());
  }

  public Scan.ColumnarSupportMode columnarSupportMode() {
    return template().columnarSupportMode();
  }

  public CustomMetric[] supportedCustomMetrics() {
    return template().supportedCustomMetrics();
  }

  public CustomTaskMetric[] reportDriverMetrics() {
    return template().reportDriverMetrics();
  }

  /** Spark asks several times, and compares scans by their batches. */
  public synchronized Batch toBatch() {
    if (batch == null) {
      batch = planned();
    }
    return batch;
  }

  private Batch planned() {
    StructType asked = withHints();
    PythonDataSourceReadInfo plan;
    synchronized (table.source) {
      plan = table.source.source().createReadInfoInPython(
          table.source.getOrCreateDataSourceInPython(TopicRelations.FORMAT, options, scala.Option.apply(table.readable())), asked,
          false);
      synchronized (PLANNED) {
        if (!PLANNED.containsKey(table.source)) {
          PLANNED.put(table.source, encoded(plan.partitions()));
        }
      }
    }
    Batch found = lookedUp(plan, asked);
    if (found != null) {
      return found;
    }
    PythonDataSourceV2 own = new PythonDataSourceV2();
    own.setShortName(TopicRelations.FORMAT);
    own.setReadInfo(plan);
    return new PythonBatch(own, TopicRelations.FORMAT, asked, options);
  }

  public MicroBatchStream toMicroBatchStream(String checkpoint) {
    PythonDataSourceV2 own = new PythonDataSourceV2();
    own.setShortName(TopicRelations.FORMAT);
    return new PythonScan(own, TopicRelations.FORMAT, columns, options, new Filter[0]).toMicroBatchStream(checkpoint);
  }

  private PythonScan template() {
    return new PythonScan(table.source, TopicRelations.FORMAT, columns, options, new Filter[0]);
  }

  private StructType withHints() {
    Map hints = new HashMap();
    hints.put("conditions", conditions);
    if (aggregates != null) {
      hints.put("aggregates", aggregates.hints());
    }
    synchronized (PLANNED) {
      hints.put("partitions", PLANNED.get(table.source));
    }
    String json;
    try {
      json = JSON.writeValueAsString(hints);
    } catch (Exception error) {
      throw new RuntimeException(error);
    }
    StructField[] fields = readSchema().fields();
    if (fields.length == 0) {
      fields = new StructField[] {new StructField(ROWS, DataTypes.BooleanType, true, Metadata.empty())};
    }
    StructField[] asked = new StructField[fields.length];
    for (int number = 0; number < fields.length; number++) {
      asked[number] = fields[number];
    }
    Metadata metadata = new MetadataBuilder().withMetadata(fields[0].metadata()).putString(HINTS, json).build();
    asked[0] = new StructField(fields[0].name(), fields[0].dataType(), fields[0].nullable(), metadata);
    return new StructType(asked);
  }

  /** The rows themselves, if planning found them all; else null, and tasks read them in Python. */
  private static Batch lookedUp(PythonDataSourceReadInfo plan, StructType asked) {
    try {
      return plan.partitions().size() == 1 ? LookedUpRows.in((byte[]) plan.partitions().apply(0), asked) : null;
    } catch (Throwable error) {
      Fallback.report("rows that were looked up are read by a task", error);
      return null;
    }
  }

  /** The text of a snapshot as a hint, null if there is none. */
  private static List encoded(scala.collection.immutable.Seq partitions) {
    byte[] snapshot = PlannedPartition.snapshotIn((byte[]) partitions.apply(0));
    List texts = new ArrayList();
    if (snapshot != null) {
      texts.add(Base64.getEncoder().encodeToString(snapshot));
    }
    return texts;
  }
}
