package persisting.spark;

import java.util.HashSet;
import java.util.Locale;
import java.util.Set;
import org.apache.spark.sql.catalyst.plans.logical.LogicalPlan;
import org.apache.spark.sql.catalyst.rules.Rule;
import org.apache.spark.sql.catalyst.trees.TreeNode;
import org.apache.spark.sql.execution.datasources.v2.DataSourceV2Relation;
import org.apache.spark.sql.execution.datasources.v2.python.PythonTable;
import org.apache.spark.sql.internal.SQLConf;
import org.apache.spark.sql.types.DataType;
import org.apache.spark.sql.types.StructField;
import org.apache.spark.sql.types.StructType;
import scala.runtime.AbstractFunction1;

/**
 * Gives every batch relation of the format persisting a table that supports push-down. Spark's own rules then ask it for
 * columns and conditions.
 */
public class TopicRelations extends Rule {
  static final String FORMAT = "persisting";
  static final String SETTING = "spark.persisting.pruning";

  public TreeNode apply(TreeNode plan) {
    return isOn() ? replace((LogicalPlan) plan) : plan;
  }

  static boolean isOn() {
    return !"false".equalsIgnoreCase(SQLConf.get().getConfString(SETTING, "true"));
  }

  LogicalPlan replace(LogicalPlan plan) {
    if (plan instanceof DataSourceV2Relation) {
      DataSourceV2Relation relation = (DataSourceV2Relation) plan;
      if (relation.table() instanceof PythonTable && FORMAT.equals(relation.table().name())) {
        try {
          TopicTable table = TopicTable.of((PythonTable) relation.table());
          if (!table.isPrunable()) {
            return plan;
          }
          LogicalPlan replaced = relation.copy(table, relation.output(), relation.catalog(), relation.identifier(),
              relation.options(), relation.timeTravelSpec());
          replaced.copyTagsFrom(plan);
          return replaced;
        } catch (Throwable error) {
          Fallback.report("a topic is read without push-down", error);
          return plan;
        }
      }
      return plan;
    }
    return (LogicalPlan) plan.mapChildren(new Replace(this));
  }

  /** Whether Spark can tell all fields apart by name; its push-down cannot cope with names that differ only in case. */
  static boolean areDistinct(DataType type) {
    if (SQLConf.get().caseSensitiveAnalysis() || !(type instanceof StructType)) {
      return true;
    }
    Set names = new HashSet();
    StructField[] fields = ((StructType) type).fields();
    for (int number = 0; number < fields.length; number++) {
      if (!names.add(fields[number].name().toLowerCase(Locale.ROOT)) || !areDistinct(fields[number].dataType())) {
        return false;
      }
    }
    return true;
  }

  static class Replace extends AbstractFunction1 {
    private final TopicRelations rule;

    Replace(TopicRelations rule) {
      this.rule = rule;
    }

    public Object apply(Object plan) {
      return rule.replace((LogicalPlan) plan);
    }
  }
}
