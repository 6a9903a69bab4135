package persisting.spark;

import java.lang.reflect.Field;
import java.util.Set;
import org.apache.spark.sql.connector.catalog.Column;
import org.apache.spark.sql.connector.catalog.SupportsRead;
import org.apache.spark.sql.connector.catalog.Table;
import org.apache.spark.sql.connector.read.ScanBuilder;
import org.apache.spark.sql.execution.datasources.v2.python.PythonDataSourceV2;
import org.apache.spark.sql.execution.datasources.v2.python.PythonTable;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.util.CaseInsensitiveStringMap;

/** A topic as a table whose scans take columns and conditions. */
public class TopicTable implements Table, SupportsRead {
  private final PythonTable table;
  final PythonDataSourceV2 source;

  TopicTable(PythonTable table) throws Exception {
    this.table = table;
    Field field = PythonTable.class.getDeclaredField("ds");
    field.setAccessible(true);
    this.source = (PythonDataSourceV2) field.get(table);
  }

  public String name() {
    return table.name();
  }

  public StructType schema() {
    return table.schema();
  }

  public Column[] columns() {
    return table.columns();
  }

  public Set capabilities() {
    return table.capabilities();
  }

  public ScanBuilder newScanBuilder(CaseInsensitiveStringMap options) {
    return new TopicScanBuilder(this, options);
  }
}
