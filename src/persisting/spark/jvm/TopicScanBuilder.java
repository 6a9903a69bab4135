package persisting.spark;

import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import org.apache.spark.sql.catalyst.expressions.Expression;
import org.apache.spark.sql.connector.expressions.filter.Predicate;
import org.apache.spark.sql.connector.read.Scan;
import org.apache.spark.sql.connector.read.SupportsPushDownRequiredColumns;
import org.apache.spark.sql.internal.connector.SupportsPushDownCatalystFilters;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.util.CaseInsensitiveStringMap;
import scala.collection.immutable.Seq;

/**
 * Collects what one scan needs. Spark evaluates every condition again, so a pushed condition only has to keep all rows for
 * which Spark's is true. Where push-down is off, or cannot tell the fields apart, the scan has all columns and no conditions.
 */
public class TopicScanBuilder implements SupportsPushDownRequiredColumns, SupportsPushDownCatalystFilters {
  private final TopicTable table;
  private final CaseInsensitiveStringMap options;
  private final boolean pushes;
  private StructType columns;
  private final List conditions = new ArrayList();
  private final List shown = new ArrayList();

  TopicScanBuilder(TopicTable table, CaseInsensitiveStringMap options) {
    this.table = table;
    this.options = options;
    this.columns = table.schema();
    this.pushes = TopicRelations.isOn() && table.isPrunable();
  }

  public void pruneColumns(StructType required) {
    columns = pushes ? required : withMetadata(required);
  }

  /** All columns of the table, and those of metadata that a query selects. */
  private StructType withMetadata(StructType required) {
    StructType all = table.schema();
    List names = Arrays.asList(all.fieldNames());
    for (int number = 0; number < required.fields().length; number++) {
      if (!names.contains(required.fields()[number].name())) {
        all = all.add(required.fields()[number]);
      }
    }
    return all;
  }

  public Seq pushFilters(Seq filters) {
    for (int number = 0; pushes && number < filters.size(); number++) {
      Expression filter = (Expression) filters.apply(number);
      try {
        Object condition = Conditions.translate(filter, false);
        if (condition != null) {
          conditions.add(condition);
          shown.add(filter.sql());
        }
      } catch (Throwable error) {
        Fallback.report("cannot push a condition down", error);
      }
    }
    return filters;
  }

  public Predicate[] pushedFilters() {
    return new Predicate[0];
  }

  public Scan build() {
    return new TopicScan(table, options, columns, conditions, shown, null);
  }
}
