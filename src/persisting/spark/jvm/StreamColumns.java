package persisting.spark;

import java.util.ArrayList;
import java.util.List;
import org.apache.spark.sql.catalyst.expressions.AttributeReference;
import org.apache.spark.sql.catalyst.expressions.AttributeSet;
import org.apache.spark.sql.catalyst.expressions.NamedExpression;
import org.apache.spark.sql.catalyst.plans.logical.Aggregate;
import org.apache.spark.sql.catalyst.plans.logical.EventTimeWatermark;
import org.apache.spark.sql.catalyst.plans.logical.Filter;
import org.apache.spark.sql.catalyst.plans.logical.Join;
import org.apache.spark.sql.catalyst.plans.logical.LogicalPlan;
import org.apache.spark.sql.catalyst.plans.logical.Project;
import org.apache.spark.sql.catalyst.plans.logical.SubqueryAlias;
import org.apache.spark.sql.catalyst.rules.Rule;
import org.apache.spark.sql.catalyst.streaming.StreamingRelationV2;
import org.apache.spark.sql.catalyst.streaming.WriteToStream;
import org.apache.spark.sql.catalyst.trees.TreeNode;
import org.apache.spark.sql.connector.catalog.Table;
import org.apache.spark.sql.execution.datasources.v2.python.PythonTable;
import org.apache.spark.sql.types.StructField;
import org.apache.spark.sql.types.StructType;
import scala.collection.mutable.ArrayBuffer;
import scala.runtime.AbstractFunction1;

/**
 * Leaves out the columns of topics that a streaming query does not use. Spark creates the reader of a stream from the analyzed
 * plan, before it optimizes, so this looks at that plan, once the query is being started.
 */
public class StreamColumns extends Rule {
  public TreeNode apply(TreeNode plan) {
    if (!(plan instanceof WriteToStream) || !TopicRelations.isOn()) {
      return plan;
    }
    try {
      LogicalPlan query = ((WriteToStream) plan).inputQuery();
      AttributeSet used = query.outputSet();
      LogicalPlan narrow = narrowed(query, used);
      return narrow == query ? plan : ((WriteToStream) plan).withNewChildInternal(narrow);
    } catch (Throwable error) {
      Fallback.report("a stream reads all columns", error);
      return plan;
    }
  }

  /** Narrows the topics below a plan, of which the attributes in used are needed. */
  private static LogicalPlan narrowed(LogicalPlan plan, AttributeSet used) {
    if (plan instanceof StreamingRelationV2) {
      return narrowed((StreamingRelationV2) plan, used);
    }
    if (!uses(plan)) {
      return plan;
    }
    LogicalPlan narrow = plan instanceof Project ? narrowed((Project) plan, used) : plan;
    return (LogicalPlan) narrow.mapChildren(new Narrow(used.$plus$plus(narrow.references())));
  }

  /** Leaves out what nobody uses. Spark puts all columns into the projections that it makes for windows and joins. */
  private static Project narrowed(Project project, AttributeSet used) {
    ArrayBuffer kept = new ArrayBuffer();
    for (int number = 0; number < project.projectList().size(); number++) {
      NamedExpression expression = (NamedExpression) project.projectList().apply(number);
      if (used.contains(expression)) {
        kept.append(expression);
      }
    }
    if (kept.isEmpty() || kept.size() == project.projectList().size()) {
      return project;
    }
    Project narrow = new Project(kept.toSeq(), (LogicalPlan) project.child());
    narrow.copyTagsFrom(project);
    return narrow;
  }

  /** Whether an operator uses only the attributes that it or those above it refer to. Distinct, for example, uses all. */
  private static boolean uses(LogicalPlan plan) {
    return plan instanceof Project || plan instanceof Filter || plan instanceof SubqueryAlias || plan instanceof Aggregate
        || plan instanceof EventTimeWatermark || plan instanceof Join;
  }

  private static LogicalPlan narrowed(StreamingRelationV2 relation, AttributeSet used) {
    boolean named = relation.table() instanceof CatalogTopic;
    if (!named && !(relation.table() instanceof PythonTable && TopicRelations.FORMAT.equals(relation.table().name()))) {
      return relation;
    }
    ArrayBuffer output = new ArrayBuffer();
    List fields = new ArrayList();
    for (int number = 0; number < relation.output().size(); number++) {
      AttributeReference field = (AttributeReference) relation.output().apply(number);
      if (used.contains(field)) {
        output.append(field);
        fields.add(new StructField(field.name(), field.dataType(), field.nullable(), field.metadata()));
      }
    }
    if (fields.isEmpty() || fields.size() == relation.output().size()) {
      return relation;
    }
    StructType schema = new StructType((StructField[]) fields.toArray(new StructField[0]));
    Table table = named ? (Table) ((CatalogTopic) relation.table()).narrowedTo(schema)
        : new PythonTable(CatalogTopic.newSource(), TopicRelations.FORMAT, schema);
    return relation.copy(relation.source(), relation.sourceName(), table, relation.extraOptions(), output.toSeq(),
        relation.catalog(), relation.identifier(), relation.v1Relation(), relation.sourceIdentifyingName());
  }

  static class Narrow extends AbstractFunction1 {
    private final AttributeSet used;

    Narrow(AttributeSet used) {
      this.used = used;
    }

    public Object apply(Object plan) {
      return narrowed((LogicalPlan) plan, used);
    }
  }
}
