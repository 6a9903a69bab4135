package persisting.spark;

import java.util.Arrays;
import org.apache.spark.rdd.RDD;
import org.apache.spark.sql.catalyst.InternalRow;
import org.apache.spark.sql.catalyst.expressions.UnsafeRow;
import org.apache.spark.sql.catalyst.trees.TreeNode;
import org.apache.spark.sql.execution.SparkPlan;
import scala.Function1;
import scala.collection.immutable.IndexedSeq;
import scala.collection.immutable.Nil$;
import scala.collection.immutable.Seq;
import scala.collection.mutable.ArrayBuffer;
import scala.reflect.ClassTag$;

/** The root of a query that may be a lookup: returns its rows if planning the scan finds them, else runs the query below. */
public class LookUpExec extends SparkPlan {
  private final SparkPlan query;
  private final transient LookUp lookUp;

  public LookUpExec(SparkPlan query, LookUp lookUp) {
    this.query = query;
    this.lookUp = lookUp;
  }

  public String nodeName() {
    return "LookUp";
  }

  public Seq output() {
    return query.output();
  }

  public RDD doExecute() {
    UnsafeRow[] rows = lookUp.rows();
    if (rows == null) {
      return query.execute();
    }
    ArrayBuffer listed = new ArrayBuffer();
    for (int number = 0; number < rows.length; number++) {
      listed.append(rows[number]);
    }
    return sparkContext().parallelize(listed.toSeq(), 1, ClassTag$.MODULE$.apply(InternalRow.class));
  }

  public InternalRow[] executeCollect() {
    UnsafeRow[] rows = lookUp.rows();
    return rows == null ? query.executeCollect() : between(rows, 0, rows.length);
  }

  public InternalRow[] executeTake(int count) {
    UnsafeRow[] rows = lookUp.rows();
    return rows == null ? query.executeTake(count) : between(rows, 0, Math.min(count, rows.length));
  }

  public InternalRow[] executeTail(int count) {
    UnsafeRow[] rows = lookUp.rows();
    return rows == null ? query.executeTail(count) : between(rows, Math.max(0, rows.length - count), rows.length);
  }

  private static InternalRow[] between(UnsafeRow[] rows, int start, int end) {
    return (InternalRow[]) Arrays.copyOfRange(rows, start, end, InternalRow[].class);
  }

  // What Spark's trees need

  public Seq children() {
    return (Seq) Nil$.MODULE$.$plus$colon(query);
  }

  public TreeNode mapChildren(Function1 change) {
    SparkPlan changed = (SparkPlan) change.apply(query);
    return changed.fastEquals(query) ? this : copied(changed);
  }

  public TreeNode withNewChildrenInternal(IndexedSeq changed) {
    return new LookUpExec((SparkPlan) changed.apply(0), lookUp);
  }

  private LookUpExec copied(SparkPlan changed) {
    LookUpExec copy = new LookUpExec(changed, lookUp);
    copy.copyTagsFrom(this);
    return copy;
  }

  public Seq otherCopyArgs() {
    return (Seq) Nil$.MODULE$.$plus$colon(lookUp);
  }

  public int productArity() {
    return 1;
  }

  public Object productElement(int number) {
    return query;
  }

  public boolean canEqual(Object other) {
    return other instanceof LookUpExec;
  }
}
