package persisting.spark;

import java.util.ArrayList;
import java.util.Arrays;
import java.util.HashMap;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.Set;
import org.apache.spark.sql.connector.expressions.Expression;
import org.apache.spark.sql.connector.expressions.NamedReference;
import org.apache.spark.sql.connector.expressions.aggregate.AggregateFunc;
import org.apache.spark.sql.connector.expressions.aggregate.Aggregation;
import org.apache.spark.sql.connector.expressions.aggregate.Count;
import org.apache.spark.sql.connector.expressions.aggregate.CountStar;
import org.apache.spark.sql.connector.expressions.aggregate.Max;
import org.apache.spark.sql.connector.expressions.aggregate.Min;
import org.apache.spark.sql.connector.expressions.aggregate.Sum;
import org.apache.spark.sql.types.DataType;
import org.apache.spark.sql.types.DataTypes;
import org.apache.spark.sql.types.StructField;
import org.apache.spark.sql.types.StructType;

/**
 * Aggregates that the tasks of a scan compute for the rows that they read. Only types whose groups, order and sums mean the same
 * in Arrow as in Spark: no floating-point groups or extremes, no decimals, no collations but the binary one.
 */
final class PartialAggregates {
  private static final Set INTEGERS = new HashSet(
      Arrays.asList(new Object[] {DataTypes.ByteType, DataTypes.ShortType, DataTypes.IntegerType, DataTypes.LongType}));
  private static final Set FRACTIONS = new HashSet(Arrays.asList(new Object[] {DataTypes.FloatType, DataTypes.DoubleType}));
  private static final Set GROUPS = with(INTEGERS, new Object[] {DataTypes.StringType, DataTypes.BooleanType, DataTypes.DateType});
  private static final Set ORDERED = with(INTEGERS,
      new Object[] {DataTypes.StringType, DataTypes.DateType, DataTypes.TimestampType, DataTypes.TimestampNTZType});
  private static final Set COUNTED = with(with(ORDERED, FRACTIONS.toArray()),
      new Object[] {DataTypes.BooleanType, DataTypes.BinaryType});

  private final StructType columns;
  private final List groups = new ArrayList();
  private final List values = new ArrayList();
  private final List fields = new ArrayList();
  private final Set names = new HashSet();

  private PartialAggregates(StructType columns) {
    this.columns = columns;
  }

  /** What tasks compute; null if any part of it must stay with Spark. */
  static PartialAggregates of(Aggregation aggregation, StructType columns) {
    PartialAggregates partial = new PartialAggregates(columns);
    Expression[] groups = aggregation.groupByExpressions();
    for (int number = 0; number < groups.length; number++) {
      if (!partial.addGroup(partial.column(groups[number]))) {
        return null;
      }
    }
    AggregateFunc[] functions = aggregation.aggregateExpressions();
    for (int number = 0; number < functions.length; number++) {
      if (!partial.addValue(functions[number])) {
        return null;
      }
    }
    return partial;
  }

  /** The groups, then the aggregates, as Spark expects them. */
  StructType schema() {
    return new StructType((StructField[]) fields.toArray(new StructField[0]));
  }

  Map hints() {
    Map hints = new HashMap();
    hints.put("groups", groups);
    hints.put("values", values);
    hints.put("columns", columns.json());
    return hints;
  }

  public String toString() {
    return fields.toString();
  }

  private boolean addGroup(StructField column) {
    if (column == null || !GROUPS.contains(column.dataType())) {
      return false;
    }
    groups.add(column.name());
    return add(column.name(), column.dataType());
  }

  private boolean addValue(AggregateFunc function) {
    if (function instanceof CountStar) {
      return addValue("count_all", "*", DataTypes.LongType);
    }
    if (function instanceof Count) {
      Count count = (Count) function;
      StructField column = column(count.column());
      return column != null && !count.isDistinct() && COUNTED.contains(column.dataType())
          && addValue("count", column.name(), DataTypes.LongType);
    }
    if (function instanceof Sum) {
      Sum sum = (Sum) function;
      StructField column = column(sum.column());
      if (column == null || sum.isDistinct()) {
        return false;
      }
      if (INTEGERS.contains(column.dataType())) {
        return addValue("sum", column.name(), DataTypes.LongType);
      }
      return FRACTIONS.contains(column.dataType()) && addValue("sum", column.name(), DataTypes.DoubleType);
    }
    if (function instanceof Min || function instanceof Max) {
      boolean least = function instanceof Min;
      StructField column = column(least ? ((Min) function).column() : ((Max) function).column());
      return column != null && ORDERED.contains(column.dataType())
          && addValue(least ? "min" : "max", column.name(), column.dataType());
    }
    return false;
  }

  private boolean addValue(String function, String column, DataType type) {
    values.add(Arrays.asList(new Object[] {function, column}));
    return add((function.equals("count_all") ? "count" : function) + "(" + column + ")", type);
  }

  private boolean add(String name, DataType type) {
    fields.add(DataTypes.createStructField(name, type, true));
    return names.add(name);
  }

  /** The column that an expression is; null if it is anything else. */
  private StructField column(Expression expression) {
    if (!(expression instanceof NamedReference) || ((NamedReference) expression).fieldNames().length != 1) {
      return null;
    }
    String name = ((NamedReference) expression).fieldNames()[0];
    for (int number = 0; number < columns.fields().length; number++) {
      if (columns.fields()[number].name().equals(name)) {
        return columns.fields()[number];
      }
    }
    return null;
  }

  private static Set with(Set some, Object[] more) {
    Set all = new HashSet(some);
    all.addAll(Arrays.asList(more));
    return all;
  }
}
