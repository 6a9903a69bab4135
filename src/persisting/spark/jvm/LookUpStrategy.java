package persisting.spark;

import org.apache.spark.sql.catalyst.plans.logical.LogicalPlan;
import org.apache.spark.sql.catalyst.plans.logical.ReturnAnswer;
import org.apache.spark.sql.catalyst.trees.TreeNodeTag;
import org.apache.spark.sql.execution.SparkStrategy;
import scala.collection.immutable.Seq;

/** Plans a query that may be a lookup as Spark does, below a node that does not run it if an index finds the rows. */
public class LookUpStrategy extends SparkStrategy {
  private static final Seq NOTHING = (Seq) scala.collection.immutable.Nil$.MODULE$;
  private static final TreeNodeTag SEEN = new TreeNodeTag("persisting.seen");

  public Seq apply(LogicalPlan plan) {
    if (!(plan instanceof ReturnAnswer) || plan.getTagValue(SEEN).isDefined() || !TopicRelations.isOn()) {
      return NOTHING;
    }
    try {
      LookUp lookUp = LookUp.of(((ReturnAnswer) plan).child());
      if (lookUp == null) {
        return NOTHING;
      }
      ReturnAnswer answer = new ReturnAnswer(((ReturnAnswer) plan).child());
      answer.setTagValue(SEEN, Boolean.TRUE);
      return (Seq) NOTHING.$plus$colon(new LookUpExec(planLater(answer), lookUp));
    } catch (Throwable error) {
      Fallback.report("a lookup is planned as any query", error);
      return NOTHING;
    }
  }
}
