package persisting.spark;

import org.slf4j.Logger;
import org.slf4j.LoggerFactory;

/** Says once, at debug level, that something is read as without push-down. */
final class Fallback {
  private static final Logger LOG = LoggerFactory.getLogger("persisting.spark.Pruning");
  private static volatile boolean reported = false;

  static void report(String what, Throwable error) {
    if (!reported) {
      reported = true;
      LOG.debug(what, error);
    }
  }
}
