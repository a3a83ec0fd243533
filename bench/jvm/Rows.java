import com.fasterxml.jackson.core.JsonFactory;
import com.fasterxml.jackson.core.JsonParser;
import com.fasterxml.jackson.core.JsonToken;
import java.io.IOException;
import java.util.ArrayList;
import java.util.List;

/** What the Java contenders share: a message of the benchmark, read by Jackson's streaming parser, and a record. */
public final class Rows {
  private static final JsonFactory FACTORY = new JsonFactory();

  private Rows() {}

  /** A row's columns. */
  public static class Row {
    public String id;
    public double price;
    public long size;

    public Row() {}

    public Row(String id, double price, long size) {
      this.id = id;
      this.price = price;
      this.size = size;
    }
  }

  /** A message as the machine needs it: fields it does not know are skipped, not built. */
  public static class Message {
    public String session;
    public String type;
    public long seq;
    public Row row = new Row();
    public List<Row> rows;

    public static Message parse(byte[] value) throws IOException {
      Message found = new Message();
      try (JsonParser json = FACTORY.createParser(value)) {
        json.nextToken();
        while (json.nextToken() == JsonToken.FIELD_NAME) {
          String name = json.currentName();
          json.nextToken();
          switch (name) {
            case "session" -> found.session = json.getText();
            case "type" -> found.type = json.getText();
            case "seq" -> found.seq = json.getLongValue();
            case "rows" -> found.rows = many(json);
            default -> column(found.row, name, json);
          }
        }
      }
      return found;
    }

    private static List<Row> many(JsonParser json) throws IOException {
      List<Row> rows = new ArrayList<>();
      while (json.nextToken() != JsonToken.END_ARRAY) {
        Row row = new Row();
        while (json.nextToken() == JsonToken.FIELD_NAME) {
          String name = json.currentName();
          json.nextToken();
          column(row, name, json);
        }
        rows.add(row);
      }
      return rows;
    }

    private static void column(Row row, String name, JsonParser json) throws IOException {
      switch (name) {
        case "id" -> row.id = json.getText();
        case "price" -> row.price = json.getDoubleValue();
        case "size" -> row.size = json.getLongValue();
        default -> json.skipChildren();
      }
    }
  }

  /** A record: a row before and after. */
  public static class Change {
    public int partition;
    public long offset;
    public String session;
    public long seq;
    public String op;
    public String id;
    public Double price;
    public Long size;
    public Double oldPrice;
    public Long oldSize;

    public Change() {}

    public Change(int partition, long offset, Message message, String id, Row now, Row before) {
      this.partition = partition;
      this.offset = offset;
      this.session = message.session;
      this.seq = message.seq;
      this.op = message.type;
      this.id = id;
      if (now != null) {
        this.price = now.price;
        this.size = now.size;
      }
      if (before != null) {
        this.oldPrice = before.price;
        this.oldSize = before.size;
      }
    }
  }

  /** The parent measures between these two lines; a line from it starts the work, another one ends us. */
  public static void ready() throws IOException {
    System.out.println("READY");
    System.in.read();
  }

  public static void done() throws IOException {
    System.out.println("DONE");
    System.in.read();
    System.exit(0);
  }
}
