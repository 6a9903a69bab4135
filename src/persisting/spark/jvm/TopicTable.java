package persisting.spark;

import java.util.Set;
import org.apache.spark.sql.connector.catalog.SupportsRead;
import org.apache.spark.sql.connector.catalog.Table;
import org.apache.spark.sql.connector.read.ScanBuilder;
import org.apache.spark.sql.execution.datasources.v2.python.PythonDataSourceV2;
import org.apache.spark.sql.execution.datasources.v2.python.PythonTable;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.util.CaseInsensitiveStringMap;

/** A topic as a table whose scans take columns and conditions. */
public class TopicTable implements Table, SupportsRead {
  final PythonDataSourceV2 source;
  private final StructType schema;
  private final Set capabilities;

  TopicTable(PythonDataSourceV2 source, StructType schema, Set capabilities) {
    this.source = source;
    this.schema = schema;
    this.capabilities = capabilities;
  }

  /** The same table as Spark's own, with push-down. */
  static TopicTable of(PythonTable table) throws Exception {
    java.lang.reflect.Field field = PythonTable.class.getDeclaredField("ds");
    field.setAccessible(true);
    return new TopicTable((PythonDataSourceV2) field.get(table), table.schema(), table.capabilities());
  }

  public String name() {
    return TopicRelations.FORMAT;
  }

  public StructType schema() {
    return schema;
  }

  /** The columns that a reader can be asked for. */
  StructType readable() {
    return schema;
  }

  /** Whether Spark's push-down can tell the fields apart; if not, all columns are read. */
  boolean isPrunable() {
    if (TopicRelations.areDistinct(readable())) {
      return true;
    }
    Fallback.report("a topic whose fields differ only in case is read without push-down", null);
    return false;
  }

  public Set capabilities() {
    return capabilities;
  }

  public ScanBuilder newScanBuilder(CaseInsensitiveStringMap options) {
    return new TopicScanBuilder(this, options);
  }
}
