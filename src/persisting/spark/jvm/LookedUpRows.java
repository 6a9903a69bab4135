package persisting.spark;

import java.util.ArrayList;
import java.util.List;
import org.apache.spark.sql.catalyst.InternalRow;
import org.apache.spark.sql.catalyst.expressions.BoundReference;
import org.apache.spark.sql.catalyst.expressions.InterpretedUnsafeProjection;
import org.apache.spark.sql.catalyst.expressions.UnsafeProjection;
import org.apache.spark.sql.catalyst.expressions.UnsafeRow;
import org.apache.spark.sql.connector.read.Batch;
import org.apache.spark.sql.connector.read.InputPartition;
import org.apache.spark.sql.connector.read.PartitionReaderFactory;
import org.apache.spark.sql.execution.arrow.ArrowConverters$;
import org.apache.spark.sql.execution.streaming.runtime.MemoryStreamInputPartition;
import org.apache.spark.sql.execution.streaming.runtime.MemoryStreamReaderFactory$;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.util.CloseableIterator;
import scala.collection.mutable.ArrayBuffer;

/**
 * All rows of a scan, which Python found in an index while it planned the scan. No task starts Python for them. Executors need no
 * class of ours to read them.
 */
public class LookedUpRows implements Batch {
  private final UnsafeRow[] rows;

  private LookedUpRows(UnsafeRow[] rows) {
    this.rows = rows;
  }

  /** The rows that the only partition of a scan carries; null if tasks must read the topic. */
  static LookedUpRows in(byte[] partition, StructType columns) throws Exception {
    byte[] stream = PlannedPartition.rowsIn(partition);
    return stream == null ? null : new LookedUpRows(decoded(stream, columns));
  }

  UnsafeRow[] rows() {
    return rows;
  }

  public InputPartition[] planInputPartitions() {
    return new InputPartition[] {new MemoryStreamInputPartition(rows)};
  }

  public PartitionReaderFactory createReaderFactory() {
    return MemoryStreamReaderFactory$.MODULE$;
  }

  /** Decodes an Arrow stream as Spark decodes those of its Python workers. */
  private static UnsafeRow[] decoded(byte[] stream, StructType columns) throws Exception {
    ArrayBuffer fields = new ArrayBuffer();
    for (int number = 0; number < columns.fields().length; number++) {
      fields.append(new BoundReference(number, columns.fields()[number].dataType(), true));
    }
    UnsafeProjection copy = InterpretedUnsafeProjection.createProjection(fields.toSeq());
    CloseableIterator found = (CloseableIterator) ArrowConverters$.MODULE$.fromIPCStream(stream)._1();
    List rows = new ArrayList();
    try {
      while (found.hasNext()) {
        rows.add(copy.apply((InternalRow) found.next()).copy());
      }
    } finally {
      found.close();
    }
    return (UnsafeRow[]) rows.toArray(new UnsafeRow[0]);
  }
}
