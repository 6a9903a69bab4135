package persisting.spark;

import java.nio.charset.StandardCharsets;
import java.util.Arrays;

/**
 * Finds our parts in the bytes of a partition that Python pickled: the text of the snapshot and, if planning found all rows in an
 * index, these. persisting.spark.scan_hints writes both.
 */
final class PlannedPartition {
  private static final byte[] MARK = "persisting.snapshot:".getBytes(StandardCharsets.US_ASCII);
  private static final byte[] ROWS = "rows:".getBytes(StandardCharsets.US_ASCII);
  private static final int SIZE_DIGITS = 8;
  private static final int KEY_LENGTH = 32;

  /** The text of the snapshot; null if the partition has none. */
  static byte[] snapshotIn(byte[] partition) {
    int start = lastIndexOf(MARK, partition);
    return start < 0 ? null : Arrays.copyOfRange(partition, start, endOfSnapshot(partition, start));
  }

  /**
   * All rows of the scan as an Arrow stream; null if tasks must read the topic. The text after the snapshot has a random key, which no
   * value of a record can contain, and their length. The same key is in front of the rows.
   */
  static byte[] rowsIn(byte[] partition) {
    int start = lastIndexOf(MARK, partition);
    int place = start < 0 ? -1 : endOfSnapshot(partition, start);
    if (place < 0 || !isAt(ROWS, partition, place)) {
      return null;
    }
    place += ROWS.length;
    byte[] key = Arrays.copyOfRange(partition, place, place + KEY_LENGTH);
    int size = number(partition, place + KEY_LENGTH);
    int rows = indexOf(key, partition) + KEY_LENGTH;
    if (rows + size > start) {
      throw new IllegalStateException("the rows of a planned partition are not where its text says");
    }
    return Arrays.copyOfRange(partition, rows, rows + size);
  }

  private static int endOfSnapshot(byte[] partition, int start) {
    int digits = start + MARK.length;
    return digits + SIZE_DIGITS + number(partition, digits);
  }

  private static int number(byte[] bytes, int start) {
    return Integer.parseInt(new String(bytes, start, SIZE_DIGITS, StandardCharsets.US_ASCII));
  }

  private static int indexOf(byte[] wanted, byte[] bytes) {
    int place = 0;
    while (!isAt(wanted, bytes, place)) {
      place++;
    }
    return place;
  }

  private static int lastIndexOf(byte[] wanted, byte[] bytes) {
    int place = bytes.length - wanted.length;
    while (place >= 0 && !isAt(wanted, bytes, place)) {
      place--;
    }
    return place;
  }

  private static boolean isAt(byte[] wanted, byte[] bytes, int place) {
    if (place + wanted.length > bytes.length) {
      return false;
    }
    for (int number = 0; number < wanted.length; number++) {
      if (bytes[place + number] != wanted[number]) {
        return false;
      }
    }
    return true;
  }
}
