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
import org.apache.spark.sql.internal.SQLConf;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.util.CaseInsensitiveStringMap;

/**
 * The topics of a folder, or below an address in an object store, as a catalog: spark.sql.catalog.NAME is this class,
 * spark.sql.catalog.NAME.path is the folder or the address. Python looks into object stores, which Java cannot open.
 * spark.sql.catalog.NAME.dropTable=true allows DROP TABLE.
 */
public class TopicCatalog implements TableCatalog {
  private static final String[] PROPERTIES = {"numBuckets", "bucketColumn", "compression", "vectors"};

  /** Properties that Spark adds by itself. */
  private static final Set IGNORED = new HashSet(Arrays.asList(new Object[] {TableCatalog.PROP_OWNER,
      TableCatalog.PROP_IS_MANAGED_LOCATION, TableCatalog.PROP_TABLE_TYPE}));

  private final Set created = Collections.synchronizedSet(new HashSet());
  private String name;

  public void initialize(String name, CaseInsensitiveStringMap options) {
    this.name = name;
    home();
  }

  /** The folder or the address of the topics now: a session may be given another one. */
  private String home() {
    String path = setting("path");
    if (path.isEmpty()) {
      throw new IllegalArgumentException("spark.sql.catalog." + name + ".path must name the folder of the topics");
    }
    return path;
  }

  private boolean inStore() {
    return home().indexOf("://") > 0;
  }

  private String setting(String key) {
    return SQLConf.get().getConfString("spark.sql.catalog." + name + "." + key, "");
  }

  public String name() {
    return name;
  }

  public Identifier[] listTables(String[] namespace) throws NoSuchNamespaceException {
    check(namespace);
    List found = new ArrayList();
    if (inStore()) {
      String[] names = namesInStore("all", null);
      for (int number = 0; number < names.length; number++) {
        found.add(Identifier.of(new String[0], names[number]));
      }
      return (Identifier[]) found.toArray(new Identifier[0]);
    }
    File[] folders = new File(home()).listFiles();
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
    if (!tableExists(table)) {
      // For NoSuchTableException Spark would take the catalog's name for a format, and the topic for a file.
      throw new IllegalArgumentException("there is no topic '" + table.name() + "' in " + home() + "; SHOW TABLES IN " + name
          + " lists those that exist");
    }
    return CatalogTopic.open(name + "." + table.name(), place(table), version);
  }

  public boolean tableExists(Identifier table) {
    if (inStore()) {
      return isPlain(table) && namesInStore("all", table).length > 0;
    }
    return isTopic(folder(table));
  }

  /** The topics in an object store, or of these the one of a table: all, or only those with rows. */
  private String[] namesInStore(String which, Identifier table) {
    Map options = new HashMap();
    options.put("path", home());
    options.put("listTopics", which);
    if (table != null) {
      options.put("topic", table.name());
    }
    return CatalogTopic.schemaOf(options).fieldNames();
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
      put(options, (String) property.getKey(), (String) property.getValue());
    }
    CatalogTopic.newSource().source().createWriteInfoInPython(TopicRelations.FORMAT, schema,
        new CaseInsensitiveStringMap(options), false, false);
    created.add(where(table));
    try {
      return loadTable(table);
    } catch (NoSuchTableException error) {
      throw new IllegalStateException("the topic " + where(table) + " was not created", error);
    }
  }

  /** Puts a property of a new table into the options of a write; raises for one that would do nothing. */
  private static void put(Map options, String key, String value) {
    String plain = key.startsWith(TableCatalog.OPTION_PREFIX) ? key.substring(TableCatalog.OPTION_PREFIX.length()) : key;
    for (int number = 0; number < PROPERTIES.length; number++) {
      if (PROPERTIES[number].equalsIgnoreCase(plain)) {
        options.put(PROPERTIES[number], value);
        return;
      }
    }
    boolean ours = TableCatalog.PROP_PROVIDER.equals(key) && TopicRelations.FORMAT.equalsIgnoreCase(value);
    if (!ours && !IGNORED.contains(key)) {
      throw new UnsupportedOperationException("CREATE TABLE: a topic has no property '" + key + "' (" + value
          + "); its properties are numBuckets, bucketColumn, compression and vectors, and its format is persisting");
    }
  }

  /** Adds columns, as a write of rows with new fields does. Other changes are not possible. */
  public Table alterTable(Identifier table, TableChange[] changes) throws NoSuchTableException {
    StructType added = new StructType();
    for (int number = 0; number < changes.length; number++) {
      if (!(changes[number] instanceof TableChange.AddColumn)) {
        throw refused();
      }
      TableChange.AddColumn column = (TableChange.AddColumn) changes[number];
      if (column.fieldNames().length > 1 || !column.isNullable() || column.position() != null
          || column.defaultValue() != null) {
        throw refused();
      }
      added = added.add(column.fieldNames()[0], column.dataType());
    }
    Map options = place(table);
    options.put("addFields", "true");
    CatalogTopic.newSource().source().createWriteInfoInPython(TopicRelations.FORMAT, added,
        new CaseInsensitiveStringMap(options), false, false);
    return loadTable(table);
  }

  private static RuntimeException refused() {
    return new UnsupportedOperationException("ALTER TABLE can only add columns to a topic, which are null in its rows; "
        + "copy it with CREATE TABLE AS SELECT, or change it in a view");
  }

  /** Spark calls this also to undo a CREATE TABLE AS SELECT that failed, so a new topic without rows is removed. */
  public boolean dropTable(Identifier table) {
    if (!tableExists(table)) {
      return false;
    }
    if (!"true".equalsIgnoreCase(setting("dropTable")) && (!created.contains(where(table)) || hasRows(table))) {
      throw new UnsupportedOperationException("DROP TABLE and REPLACE TABLE remove only empty topics that this session "
          + "created, unless the setting spark.sql.catalog." + name + ".dropTable is true; INSERT OVERWRITE replaces the "
          + "rows, and persisting delete removes a topic, too");
    }
    Map options = place(table);
    options.put("dropTopic", "true");
    CatalogTopic.newSource().source().createWriteInfoInPython(TopicRelations.FORMAT, new StructType(),
        new CaseInsensitiveStringMap(options), false, false);
    created.remove(where(table));
    return true;
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
    options.put("path", home());
    options.put("topic", table.name());
    return options;
  }

  private static boolean isPlain(Identifier table) {
    return table.namespace().length == 0 && table.name().indexOf('/') < 0 && !table.name().startsWith(".");
  }

  private File folder(Identifier table) {
    return isPlain(table) ? new File(home(), table.name()) : null;
  }

  private String where(Identifier table) {
    return home() + "/" + table.name();
  }

  private static boolean isTopic(File folder) {
    return folder != null && new File(folder, "topic.json").isFile();
  }

  private boolean hasRows(Identifier table) {
    if (inStore()) {
      return namesInStore("filled", table).length > 0;
    }
    File topic = folder(table);
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
}
