package persisting.spark;

import java.io.File;
import java.time.Instant;
import java.time.temporal.ChronoUnit;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Collections;
import java.util.HashMap;
import java.util.HashSet;
import java.util.Iterator;
import java.util.List;
import java.util.Map;
import java.util.Set;
import org.apache.spark.sql.catalyst.analysis.NoSuchNamespaceException;
import org.apache.spark.sql.catalyst.analysis.NoSuchTableException;
import org.apache.spark.sql.catalyst.analysis.TableAlreadyExistsException;
import org.apache.spark.sql.connector.catalog.Identifier;
import org.apache.spark.sql.connector.catalog.Table;
import org.apache.spark.sql.connector.catalog.TableCatalog;
import org.apache.spark.sql.connector.catalog.TableChange;
import org.apache.spark.sql.connector.expressions.Transform;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.util.CaseInsensitiveStringMap;

/** A folder of topics as a catalog: spark.sql.catalog.NAME is this class, spark.sql.catalog.NAME.path is the folder. */
public class TopicCatalog implements TableCatalog {
  private static final String[] PROPERTIES = {"numBuckets", "bucketColumn", "compression", "vectors"};

  private final Set created = Collections.synchronizedSet(new HashSet());
  private String name;
  private File home;

  public void initialize(String name, CaseInsensitiveStringMap options) {
    String path = options.get("path");
    if (path == null || path.isEmpty()) {
      throw new IllegalArgumentException("spark.sql.catalog." + name + ".path must name the folder of the topics");
    }
    this.name = name;
    this.home = new File(path);
  }

  public String name() {
    return name;
  }

  public Identifier[] listTables(String[] namespace) throws NoSuchNamespaceException {
    check(namespace);
    File[] folders = home.listFiles();
    List found = new ArrayList();
    if (folders != null) {
      Arrays.sort(folders);
      for (int number = 0; number < folders.length; number++) {
        if (isTopic(folders[number])) {
          found.add(Identifier.of(new String[0], folders[number].getName()));
        }
      }
    }
    return (Identifier[]) found.toArray(new Identifier[0]);
  }

  public Table loadTable(Identifier table) throws NoSuchTableException {
    return open(table, new HashMap());
  }

  public Table loadTable(Identifier table, String version) throws NoSuchTableException {
    Map chosen = new HashMap();
    chosen.put(version.matches("[0-9]+") ? "version" : "tag", version);
    return open(table, chosen);
  }

  public Table loadTable(Identifier table, long micros) throws NoSuchTableException {
    Map chosen = new HashMap();
    chosen.put("timestamp", Instant.EPOCH.plus(micros, ChronoUnit.MICROS).toString());
    return open(table, chosen);
  }

  private Table open(Identifier table, Map version) throws NoSuchTableException {
    if (!isTopic(folder(table))) {
      // For NoSuchTableException Spark would take the catalog's name for a format, and the topic for a file.
      throw new IllegalArgumentException("there is no topic '" + table.name() + "' in " + home + "; SHOW TABLES IN " + name
          + " lists those that exist");
    }
    return CatalogTopic.open(name + "." + table.name(), place(table), version);
  }

  public boolean tableExists(Identifier table) {
    return isTopic(folder(table));
  }

  /** Creates the topic as a write would, without rows. */
  public Table createTable(Identifier table, StructType schema, Transform[] partitions, Map properties)
      throws TableAlreadyExistsException, NoSuchNamespaceException {
    check(table.namespace());
    if (tableExists(table)) {
      throw new TableAlreadyExistsException(table);
    }
    if (partitions.length > 0) {
      throw new UnsupportedOperationException(
          "a topic is divided into buckets, not partitioned: TBLPROPERTIES ('bucketColumn' = '...', 'numBuckets' = '4')");
    }
    Map options = place(table);
    Iterator given = properties.entrySet().iterator();
    while (given.hasNext()) {
      Map.Entry property = (Map.Entry) given.next();
      for (int number = 0; number < PROPERTIES.length; number++) {
        if (PROPERTIES[number].equalsIgnoreCase((String) property.getKey())) {
          options.put(PROPERTIES[number], property.getValue());
        }
      }
    }
    CatalogTopic.newSource().source().createWriteInfoInPython(TopicRelations.FORMAT, schema,
        new CaseInsensitiveStringMap(options), false, false);
    created.add(table.name());
    try {
      return loadTable(table);
    } catch (NoSuchTableException error) {
      throw new IllegalStateException("the topic " + folder(table) + " was not created", error);
    }
  }

  public Table alterTable(Identifier table, TableChange[] changes) {
    throw new UnsupportedOperationException(
        "ALTER TABLE: the fields of a topic follow the rows; INSERT rows with the new field BY NAME");
  }

  /** Spark calls this also to undo a CREATE TABLE AS SELECT that failed, so a new topic without rows is removed. */
  public boolean dropTable(Identifier table) {
    if (!tableExists(table)) {
      return false;
    }
    if (!created.contains(table.name()) || hasRows(folder(table))) {
      throw new UnsupportedOperationException("DROP TABLE removes only empty topics that this session created; remove the "
          + "folder " + folder(table) + " when no process uses it");
    }
    return remove(folder(table));
  }

  public void renameTable(Identifier from, Identifier to) {
    throw new UnsupportedOperationException("ALTER TABLE RENAME: copy the topic with CREATE TABLE AS SELECT");
  }

  private static void check(String[] namespace) throws NoSuchNamespaceException {
    if (namespace.length > 0) {
      throw new NoSuchNamespaceException(namespace);
    }
  }

  private Map place(Identifier table) {
    Map options = new HashMap();
    options.put("path", home.getPath());
    options.put("topic", table.name());
    return options;
  }

  private File folder(Identifier table) {
    boolean plain = table.namespace().length == 0 && table.name().indexOf('/') < 0 && !table.name().startsWith(".");
    return plain ? new File(home, table.name()) : null;
  }

  private static boolean isTopic(File folder) {
    return folder != null && new File(folder, "topic.json").isFile();
  }

  private static boolean hasRows(File topic) {
    File[] buckets = topic.listFiles();
    for (int number = 0; buckets != null && number < buckets.length; number++) {
      String[] files = new File(buckets[number], "data.lance/data").list();
      if (files != null && files.length > 0) {
        return true;
      }
      String[] logs = new File(buckets[number], "wal").list();
      if (logs != null && logs.length > 0) {
        return true;
      }
    }
    return new File(topic, "log").exists();
  }

  private static boolean remove(File file) {
    File[] inside = file.listFiles();
    for (int number = 0; inside != null && number < inside.length; number++) {
      remove(inside[number]);
    }
    return file.delete();
  }
}
