package persisting.spark;

import java.util.Map;
import java.util.WeakHashMap;
import org.apache.spark.sql.SparkSessionExtensions;
import scala.runtime.AbstractFunction1;
import scala.runtime.BoxedUnit;

/** Adds our rules to a session: the value of spark.sql.extensions. */
public class PruningExtension extends AbstractFunction1 {
  private static final Map EXTENDED = new WeakHashMap();

  public Object apply(Object extensions) {
    SparkSessionExtensions target = (SparkSessionExtensions) extensions;
    if (isNew(target)) {
      injectBatchRules(target);
      target.injectPostHocResolutionRule(new RuleFactory(true));
    }
    return BoxedUnit.UNIT;
  }

  /** Adds the rules to a session that is running. Its analyzer may exist already, so streams keep all their columns. */
  public static void install(org.apache.spark.sql.classic.SparkSession session) {
    if (isNew(session.extensions())) {
      injectBatchRules(session.extensions());
    }
  }

  private static void injectBatchRules(SparkSessionExtensions extensions) {
    extensions.injectOptimizerRule(new RuleFactory(false));
    extensions.injectPlannerStrategy(new StrategyFactory(true));
    extensions.injectPlannerStrategy(new StrategyFactory(false));
  }

  private static boolean isNew(SparkSessionExtensions extensions) {
    synchronized (EXTENDED) {
      return EXTENDED.put(extensions, Boolean.TRUE) == null;
    }
  }

  static class RuleFactory extends AbstractFunction1 {
    private final boolean streams;

    RuleFactory(boolean streams) {
      this.streams = streams;
    }

    public Object apply(Object session) {
      if (streams) {
        return new StreamColumns();
      }
      return new TopicRelations();
    }
  }

  static class StrategyFactory extends AbstractFunction1 {
    private final boolean aggregates;

    StrategyFactory(boolean aggregates) {
      this.aggregates = aggregates;
    }

    public Object apply(Object session) {
      if (aggregates) {
        return new AggregateStrategy();
      }
      return new LookUpStrategy();
    }
  }
}
