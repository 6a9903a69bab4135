package persisting.spark;

import java.util.Set;
import org.apache.spark.sql.connector.catalog.SupportsRead;
import org.apache.spark.sql.connector.catalog.Table;
import org.apache.spark.sql.connector.expressions.aggregate.Aggregation;
import org.apache.spark.sql.connector.read.Scan;
import org.apache.spark.sql.connector.read.ScanBuilder;
import org.apache.spark.sql.connector.read.SupportsPushDownAggregates;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.util.CaseInsensitiveStringMap;

/** The table of one scan, for the rule of Spark that asks whether the scan can aggregate. */
public class AggregatedTopic implements Table, SupportsRead {
  private final TopicScan scan;
  private Scan aggregated;

  AggregatedTopic(TopicScan scan) {
    this.scan = scan;
  }

  boolean isPushed() {
    return aggregated != null;
  }

  public String name() {
    return scan.table().name();
  }

  public StructType schema() {
    return scan.readSchema();
  }

  public Set capabilities() {
    return scan.table().capabilities();
  }

  public ScanBuilder newScanBuilder(CaseInsensitiveStringMap options) {
    return new Builder(this);
  }

  static class Builder implements SupportsPushDownAggregates {
    private final AggregatedTopic topic;

    Builder(AggregatedTopic topic) {
      this.topic = topic;
    }

    /** Spark always combines the results of the tasks. */
    public boolean supportCompletePushDown(Aggregation aggregation) {
      return false;
    }

    public boolean pushAggregation(Aggregation aggregation) {
      PartialAggregates partial = PartialAggregates.of(aggregation, topic.scan.readSchema());
      if (partial != null) {
        topic.aggregated = topic.scan.aggregatedBy(partial);
      }
      return partial != null;
    }

    public Scan build() {
      return topic.isPushed() ? topic.aggregated : topic.scan;
    }
  }
}
