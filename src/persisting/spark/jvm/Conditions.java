package persisting.spark;

import java.util.ArrayList;
import java.util.Arrays;
import java.util.Base64;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import org.apache.spark.sql.catalyst.expressions.And;
import org.apache.spark.sql.catalyst.expressions.AttributeReference;
import org.apache.spark.sql.catalyst.expressions.BinaryComparison;
import org.apache.spark.sql.catalyst.expressions.EqualNullSafe;
import org.apache.spark.sql.catalyst.expressions.EqualTo;
import org.apache.spark.sql.catalyst.expressions.Expression;
import org.apache.spark.sql.catalyst.expressions.GetStructField;
import org.apache.spark.sql.catalyst.expressions.GreaterThan;
import org.apache.spark.sql.catalyst.expressions.GreaterThanOrEqual;
import org.apache.spark.sql.catalyst.expressions.In;
import org.apache.spark.sql.catalyst.expressions.InSet;
import org.apache.spark.sql.catalyst.expressions.IsNotNull;
import org.apache.spark.sql.catalyst.expressions.IsNull;
import org.apache.spark.sql.catalyst.expressions.LessThan;
import org.apache.spark.sql.catalyst.expressions.LessThanOrEqual;
import org.apache.spark.sql.catalyst.expressions.Literal;
import org.apache.spark.sql.catalyst.expressions.Not;
import org.apache.spark.sql.catalyst.expressions.Or;
import org.apache.spark.sql.catalyst.expressions.StartsWith;
import org.apache.spark.sql.types.BinaryType;
import org.apache.spark.sql.types.BooleanType;
import org.apache.spark.sql.types.ByteType;
import org.apache.spark.sql.types.DataType;
import org.apache.spark.sql.types.DataTypes;
import org.apache.spark.sql.types.DateType;
import org.apache.spark.sql.types.DayTimeIntervalType;
import org.apache.spark.sql.types.Decimal;
import org.apache.spark.sql.types.DecimalType;
import org.apache.spark.sql.types.DoubleType;
import org.apache.spark.sql.types.FloatType;
import org.apache.spark.sql.types.IntegerType;
import org.apache.spark.sql.types.LongType;
import org.apache.spark.sql.types.ShortType;
import org.apache.spark.sql.types.TimestampNTZType;
import org.apache.spark.sql.types.TimestampType;
import org.apache.spark.sql.types.TimeType;

/**
 * Translates conditions of Spark to trees of maps, which Python turns into a condition of the storage. Null stands for what is
 * not understood.
 */
final class Conditions {
  private static final int MOST_VALUES = 10000;

  /** With exact, the result must be true for the same rows and null for the same rows; else it may be true for more. */
  static Map translate(Expression condition, boolean exact) {
    if (condition instanceof And) {
      Map left = translate((Expression) ((And) condition).left(), exact);
      Map right = translate((Expression) ((And) condition).right(), exact);
      if (left != null && right != null) {
        return node("and", Arrays.asList(new Object[] {left, right}));
      }
      return exact ? null : left != null ? left : right;
    }
    if (condition instanceof Or) {
      Map left = translate((Expression) ((Or) condition).left(), exact);
      Map right = translate((Expression) ((Or) condition).right(), exact);
      return left == null || right == null ? null : node("or", Arrays.asList(new Object[] {left, right}));
    }
    if (condition instanceof Not) {
      Map inner = translate((Expression) ((Not) condition).child(), true);
      return inner == null ? null : node("not", Arrays.asList(new Object[] {inner}));
    }
    if (condition instanceof IsNull) {
      return test("is_null", (Expression) ((IsNull) condition).child());
    }
    if (condition instanceof IsNotNull) {
      return test("is_not_null", (Expression) ((IsNotNull) condition).child());
    }
    if (condition instanceof In) {
      return among((In) condition);
    }
    if (condition instanceof InSet) {
      return among((InSet) condition);
    }
    if (condition instanceof StartsWith) {
      StartsWith starts = (StartsWith) condition;
      return compared("starts_with", (Expression) starts.left(), (Expression) starts.right());
    }
    if (condition instanceof BinaryComparison) {
      return comparison((BinaryComparison) condition);
    }
    if (condition.dataType() instanceof BooleanType) {
      Map field = test("eq", condition);
      if (field != null) {
        field.put("values", Arrays.asList(new Object[] {Boolean.TRUE}));
        field.put("type", "boolean");
      }
      return field;
    }
    return null;
  }

  private static Map comparison(BinaryComparison condition) {
    boolean turned = (Object) condition.left() instanceof Literal;
    Expression field = (Expression) (turned ? condition.right() : condition.left());
    Expression value = (Expression) (turned ? condition.left() : condition.right());
    String op = operator(condition, turned);
    if (op == null || !(value instanceof Literal)) {
      return null;
    }
    if (((Literal) value).value() == null) {
      return op.equals("same") ? test("is_null", field) : null;
    }
    return compared(op, field, value);
  }

  private static String operator(BinaryComparison condition, boolean turned) {
    if (condition instanceof EqualTo) {
      return "eq";
    }
    if (condition instanceof EqualNullSafe) {
      return "same";
    }
    if (condition instanceof GreaterThan) {
      return turned ? "lt" : "gt";
    }
    if (condition instanceof GreaterThanOrEqual) {
      return turned ? "le" : "ge";
    }
    if (condition instanceof LessThan) {
      return turned ? "gt" : "lt";
    }
    if (condition instanceof LessThanOrEqual) {
      return turned ? "ge" : "le";
    }
    return null;
  }

  private static Map compared(String op, Expression field, Expression value) {
    if (!(value instanceof Literal) || !field.dataType().equals(((Literal) value).dataType())) {
      return null;
    }
    Map found = test(op, field);
    Object encoded = encoded(((Literal) value).value(), field.dataType());
    return found == null || encoded == null ? null : valued(found, field, Arrays.asList(new Object[] {encoded}));
  }

  private static Map among(In condition) {
    List values = new ArrayList();
    boolean nulls = false;
    for (int number = 0; number < condition.list().size(); number++) {
      Expression value = (Expression) condition.list().apply(number);
      if (!(value instanceof Literal) || !value.dataType().equals(condition.value().dataType())) {
        return null;
      }
      if (((Literal) value).value() == null) {
        nulls = true;
      } else {
        values.add(((Literal) value).value());
      }
    }
    return among((Expression) condition.value(), values, nulls);
  }

  private static Map among(InSet condition) {
    List values = new ArrayList();
    boolean nulls = false;
    scala.collection.Iterator left = condition.hset().iterator();
    while (left.hasNext()) {
      Object value = left.next();
      if (value == null) {
        nulls = true;
      } else {
        values.add(value);
      }
    }
    return among((Expression) condition.child(), values, nulls);
  }

  /** A list with a null is never false, so its negation must not be pushed. */
  private static Map among(Expression field, List values, boolean nulls) {
    Map found = test("in", field);
    if (found == null || nulls || values.isEmpty() || values.size() > MOST_VALUES) {
      return null;
    }
    List texts = new ArrayList();
    for (int number = 0; number < values.size(); number++) {
      Object encoded = encoded(values.get(number), field.dataType());
      if (encoded == null) {
        return null;
      }
      texts.add(encoded);
    }
    return valued(found, field, texts);
  }

  private static Map valued(Map found, Expression field, List values) {
    found.put("values", values);
    found.put("type", field.dataType().typeName());
    return found;
  }

  private static Map test(String op, Expression field) {
    List path = path(field);
    if (path == null) {
      return null;
    }
    Map found = new HashMap();
    found.put("op", op);
    found.put("field", path);
    return found;
  }

  private static Map node(String op, List parts) {
    Map found = new HashMap();
    found.put("op", op);
    found.put("parts", parts);
    return found;
  }

  /** The names of a field and of the structs that contain it; null if it is not a field. */
  private static List path(Expression field) {
    if (field instanceof AttributeReference) {
      List names = new ArrayList();
      names.add(((AttributeReference) field).name());
      return names;
    }
    if (field instanceof GetStructField) {
      GetStructField inner = (GetStructField) field;
      List names = path((Expression) inner.child());
      if (names != null) {
        names.add(inner.childSchema().fields()[inner.ordinal()].name());
      }
      return names;
    }
    return null;
  }

  /** A value of Spark as Python understands it: numbers of the units that Spark uses, text, or null if it cannot be pushed. */
  private static Object encoded(Object value, DataType type) {
    if (type instanceof BooleanType || type instanceof ByteType || type instanceof ShortType || type instanceof IntegerType
        || type instanceof LongType || type instanceof DateType || type instanceof TimestampType
        || type instanceof TimestampNTZType || type instanceof TimeType || type instanceof DayTimeIntervalType) {
      return value;
    }
    if (type instanceof FloatType || type instanceof DoubleType) {
      double number = ((Number) value).doubleValue();
      return Double.isNaN(number) || Double.isInfinite(number) ? null : (Object) Double.valueOf(number);
    }
    if (type.equals(DataTypes.StringType)) {
      return value.toString();
    }
    if (type instanceof BinaryType) {
      return Base64.getEncoder().encodeToString((byte[]) value);
    }
    if (type instanceof DecimalType) {
      return ((Decimal) value).toJavaBigDecimal().toPlainString();
    }
    return null;
  }
}
