package persisting.spark;

import org.apache.spark.sql.catalyst.plans.logical.Aggregate;
import org.apache.spark.sql.catalyst.plans.logical.LogicalPlan;
import org.apache.spark.sql.catalyst.plans.logical.Project;
import org.apache.spark.sql.execution.SparkStrategy;
import org.apache.spark.sql.execution.datasources.v2.DataSourceV2Relation;
import org.apache.spark.sql.execution.datasources.v2.DataSourceV2ScanRelation;
import org.apache.spark.sql.execution.datasources.v2.V2ScanRelationPushDown;
import scala.collection.immutable.Seq;

/**
 * Plans aggregates over a topic so that the scan's tasks aggregate what they read, and Spark combines their results. The
 * optimized plan stays as it is, with the columns that are read; Spark's own rule rewrites the aggregate here.
 */
public class AggregateStrategy extends SparkStrategy {
  private static final Seq NOTHING = (Seq) scala.collection.immutable.Nil$.MODULE$;

  public Seq apply(LogicalPlan plan) {
    if (!(plan instanceof Aggregate) || !TopicRelations.isOn()) {
      return NOTHING;
    }
    try {
      LogicalPlan pushed = pushed((Aggregate) plan);
      return pushed == null ? NOTHING : (Seq) NOTHING.$plus$colon(planLater(pushed));
    } catch (Throwable error) {
      Fallback.report("cannot push an aggregate down", error);
      return NOTHING;
    }
  }

  /** The aggregate over a scan that aggregates; null if the storage cannot do it. */
  private static LogicalPlan pushed(Aggregate aggregate) {
    LogicalPlan child = (LogicalPlan) aggregate.child();
    Project project = null;
    if (child instanceof Project) {
      project = (Project) child;
      child = (LogicalPlan) project.child();
    }
    if (!(child instanceof DataSourceV2ScanRelation)
        || !(((DataSourceV2ScanRelation) child).scan() instanceof TopicScan)) {
      return null;
    }
    DataSourceV2ScanRelation scanned = (DataSourceV2ScanRelation) child;
    TopicScan scan = (TopicScan) scanned.scan();
    if (!scan.canAggregate()) {
      return null;
    }
    AggregatedTopic topic = new AggregatedTopic(scan);
    DataSourceV2Relation relation = scanned.relation();
    LogicalPlan source = relation.copy(topic, scanned.output(), relation.catalog(), relation.identifier(),
        relation.options(), relation.timeTravelSpec());
    if (project != null) {
      source = (LogicalPlan) project.withNewChildren((Seq) NOTHING.$plus$colon(source));
    }
    LogicalPlan rewritten = (LogicalPlan) aggregate.withNewChildren((Seq) NOTHING.$plus$colon(source));
    rewritten = V2ScanRelationPushDown.apply(rewritten);
    return topic.isPushed() ? rewritten : null;
  }
}
