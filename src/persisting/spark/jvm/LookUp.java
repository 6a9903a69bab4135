package persisting.spark;

import java.util.ArrayList;
import java.util.List;
import org.apache.spark.sql.catalyst.expressions.Attribute;
import org.apache.spark.sql.catalyst.expressions.BindReferences;
import org.apache.spark.sql.catalyst.expressions.Expression;
import org.apache.spark.sql.catalyst.expressions.HigherOrderFunction;
import org.apache.spark.sql.catalyst.expressions.InterpretedPredicate;
import org.apache.spark.sql.catalyst.expressions.InterpretedUnsafeProjection;
import org.apache.spark.sql.catalyst.expressions.Literal;
import org.apache.spark.sql.catalyst.expressions.Unevaluable;
import org.apache.spark.sql.catalyst.expressions.UnsafeProjection;
import org.apache.spark.sql.catalyst.expressions.UnsafeRow;
import org.apache.spark.sql.catalyst.expressions.UserDefinedExpression;
import org.apache.spark.sql.catalyst.plans.logical.Filter;
import org.apache.spark.sql.catalyst.plans.logical.GlobalLimit;
import org.apache.spark.sql.catalyst.plans.logical.LocalLimit;
import org.apache.spark.sql.catalyst.plans.logical.LogicalPlan;
import org.apache.spark.sql.catalyst.plans.logical.Project;
import org.apache.spark.sql.connector.read.Batch;
import org.apache.spark.sql.execution.datasources.v2.DataSourceV2ScanRelation;
import scala.collection.immutable.Seq;

/**
 * A query that only selects rows of a topic by a condition. If its scan finds the rows in an index, they are filtered and projected
 * here, with Spark's expressions, and no job is needed.
 */
final class LookUp {
  private final TopicScan scan;
  private final Seq attributes;
  private final Expression condition;
  private final Seq selected;
  private final int limit;
  private UnsafeRow[] rows;
  private boolean isTried;

  private LookUp(TopicScan scan, Seq attributes, Expression condition, Seq selected, int limit) {
    this.scan = scan;
    this.attributes = attributes;
    this.condition = condition;
    this.selected = selected;
    this.limit = limit;
  }

  /** The lookup that a whole query is; null if it is anything else. */
  static LookUp of(LogicalPlan query) {
    LogicalPlan plan = query;
    int limit = Integer.MAX_VALUE;
    if (plan instanceof GlobalLimit && ((GlobalLimit) plan).child() instanceof LocalLimit) {
      Expression most = ((GlobalLimit) plan).limitExpr();
      if (!(most instanceof Literal) || !(((Literal) most).value() instanceof Integer)) {
        return null;
      }
      limit = ((Integer) ((Literal) most).value()).intValue();
      plan = ((LocalLimit) ((GlobalLimit) plan).child()).child();
    }
    Seq selected = plan.output();
    if (plan instanceof Project) {
      selected = ((Project) plan).projectList();
      plan = ((Project) plan).child();
    }
    if (!(plan instanceof Filter) || !(((Filter) plan).child() instanceof DataSourceV2ScanRelation)) {
      return null;
    }
    Expression condition = ((Filter) plan).condition();
    DataSourceV2ScanRelation relation = (DataSourceV2ScanRelation) ((Filter) plan).child();
    if (!(relation.scan() instanceof TopicScan) || !((TopicScan) relation.scan()).hasConditions()) {
      return null;
    }
    boolean plain = isPlain(condition);
    for (int number = 0; number < selected.size(); number++) {
      plain = plain && isPlain((Expression) selected.apply(number));
    }
    return plain ? new LookUp((TopicScan) relation.scan(), relation.output(), condition, selected, limit) : null;
  }

  /** Whether an expression of Spark's own means the same here as in a task. */
  private static boolean isPlain(Expression expression) {
    if (!expression.deterministic() || expression instanceof UserDefinedExpression
        || expression instanceof HigherOrderFunction
        || expression instanceof Unevaluable && !(expression instanceof Attribute)) {
      return false;
    }
    for (int number = 0; number < expression.children().size(); number++) {
      if (!isPlain((Expression) expression.children().apply(number))) {
        return false;
      }
    }
    return true;
  }

  /** The result of the query; null if tasks must find it, also an error in it. */
  synchronized UnsafeRow[] rows() {
    if (!isTried) {
      Batch batch = scan.toBatch();
      if (batch instanceof LookedUpRows) {
        rows = evaluated(((LookedUpRows) batch).rows());
      }
      isTried = true;
    }
    return rows;
  }

  private UnsafeRow[] evaluated(UnsafeRow[] found) {
    try {
      InterpretedPredicate test = new InterpretedPredicate(
          (Expression) BindReferences.bindReference(condition, attributeSeq(), false));
      UnsafeProjection select = InterpretedUnsafeProjection.createProjection(
          BindReferences.bindReferences(selected, attributeSeq()));
      List kept = new ArrayList();
      for (int number = 0; number < found.length && kept.size() < limit; number++) {
        if (test.eval(found[number])) {
          kept.add(select.apply(found[number]).copy());
        }
      }
      return (UnsafeRow[]) kept.toArray(new UnsafeRow[0]);
    } catch (Throwable error) {
      Fallback.report("rows that were looked up are filtered by a task", error);
      return null;
    }
  }

  private org.apache.spark.sql.catalyst.expressions.package$AttributeSeq attributeSeq() {
    return new org.apache.spark.sql.catalyst.expressions.package$AttributeSeq(attributes);
  }
}
