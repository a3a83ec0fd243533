import com.fasterxml.jackson.core.JsonEncoding;
import com.fasterxml.jackson.core.JsonFactory;
import com.fasterxml.jackson.core.JsonGenerator;
import java.io.ByteArrayOutputStream;
import java.io.IOException;
import java.io.UncheckedIOException;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.List;
import java.util.Properties;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.atomic.AtomicLong;
import org.apache.kafka.clients.consumer.ConsumerConfig;
import org.apache.kafka.clients.producer.ProducerConfig;
import org.apache.kafka.common.serialization.Serdes;
import org.apache.kafka.streams.KafkaStreams;
import org.apache.kafka.streams.KeyValue;
import org.apache.kafka.streams.StreamsConfig;
import org.apache.kafka.streams.Topology;
import org.apache.kafka.streams.processor.api.Processor;
import org.apache.kafka.streams.processor.api.ProcessorContext;
import org.apache.kafka.streams.processor.api.Record;
import org.apache.kafka.streams.state.KeyValueIterator;
import org.apache.kafka.streams.state.KeyValueStore;
import org.apache.kafka.streams.state.Stores;

/**
 * Kafka Streams: topic → rows in a RocksDB store, cached and with a changelog → topic of JSON records.
 *
 * <p>StreamsPeer CORES SERVERS TOPIC WARM_TOPIC FOLDER MESSAGES WARM_MESSAGES OUTPUT_TOPIC WARM_OUTPUT_TOPIC
 */
public class StreamsPeer {
  static final JsonFactory JSON = new JsonFactory();

  /** The table, a row to an entry of the store: session, a zero byte, id. */
  static class Machine implements Processor<byte[], byte[], byte[], byte[]> {
    private final AtomicLong left;
    private final CountDownLatch over;
    private ProcessorContext<byte[], byte[]> context;
    private KeyValueStore<byte[], byte[]> rows;

    Machine(AtomicLong left, CountDownLatch over) {
      this.left = left;
      this.over = over;
    }

    @Override
    public void init(ProcessorContext<byte[], byte[]> context) {
      this.context = context;
      this.rows = context.getStateStore("rows");
    }

    @Override
    public void process(Record<byte[], byte[]> record) {
      try {
        apply(record, Rows.Message.parse(record.value()));
      } catch (IOException error) {
        throw new UncheckedIOException(error);
      }
      if (left.decrementAndGet() == 0) {
        over.countDown();
      }
    }

    private void apply(Record<byte[], byte[]> record, Rows.Message message) throws IOException {
      if (message.type.equals("snapshot")) {
        forget(record.key());
        for (Rows.Row row : message.rows) {
          rows.put(place(record.key(), row.id), packed(row));
          emit(record, message, row.id, row, null);
        }
        return;
      }
      String id = message.row.id;
      byte[] place = place(record.key(), id);
      byte[] before = rows.get(place);
      if ((before == null) != message.type.equals("insert")) {
        throw new IllegalStateException(message.type + " of " + id);
      }
      Rows.Row now = message.type.equals("delete") ? null : message.row;
      rows.put(place, now == null ? null : packed(now));
      emit(record, message, id, now, before == null ? null : unpacked(id, before));
    }

    private void forget(byte[] session) {
      List<byte[]> gone = new ArrayList<>();
      try (KeyValueIterator<byte[], byte[]> all = rows.range(place(session, ""), place(session, "\uffff"))) {
        for (KeyValue<byte[], byte[]> one; all.hasNext(); gone.add(one.key)) {
          one = all.next();
        }
      }
      gone.forEach(rows::delete);
    }

    private void emit(Record<byte[], byte[]> record, Rows.Message message, String id, Rows.Row now, Rows.Row before)
        throws IOException {
      var place = context.recordMetadata().orElseThrow();
      Rows.Change change = new Rows.Change(place.partition(), place.offset(), message, id, now, before);
      context.forward(record.withValue(json(change)));
    }

    private static byte[] json(Rows.Change change) throws IOException {
      ByteArrayOutputStream bytes = new ByteArrayOutputStream(200);
      try (JsonGenerator to = JSON.createGenerator(bytes, JsonEncoding.UTF8)) {
        to.writeStartObject();
        to.writeNumberField("partition", change.partition);
        to.writeNumberField("offset", change.offset);
        to.writeStringField("session", change.session);
        to.writeNumberField("sequence", change.seq);
        to.writeStringField("op", change.op);
        to.writeStringField("id", change.id);
        if (change.price != null) {
          to.writeNumberField("price", change.price);
          to.writeNumberField("size", change.size);
        }
        if (change.oldPrice != null) {
          to.writeNumberField("old_price", change.oldPrice);
          to.writeNumberField("old_size", change.oldSize);
        }
        to.writeEndObject();
      }
      return bytes.toByteArray();
    }

    private static byte[] place(byte[] session, String id) {
      byte[] name = id.getBytes(StandardCharsets.UTF_8);
      return ByteBuffer.allocate(session.length + 1 + name.length).put(session).put((byte) 0).put(name).array();
    }

    private static byte[] packed(Rows.Row row) {
      return ByteBuffer.allocate(16).putDouble(row.price).putLong(row.size).array();
    }

    private static Rows.Row unpacked(String id, byte[] bytes) {
      ByteBuffer from = ByteBuffer.wrap(bytes);
      return new Rows.Row(id, from.getDouble(), from.getLong());
    }
  }

  static void run(String[] given, String topic, String output, long messages, String folder) throws Exception {
    Properties settings = new Properties();
    settings.put(StreamsConfig.APPLICATION_ID_CONFIG, output);
    settings.put(StreamsConfig.BOOTSTRAP_SERVERS_CONFIG, given[1]);
    settings.put(StreamsConfig.STATE_DIR_CONFIG, folder);
    settings.put(StreamsConfig.NUM_STREAM_THREADS_CONFIG, Integer.parseInt(given[0]));
    settings.put(StreamsConfig.STATESTORE_CACHE_MAX_BYTES_CONFIG, 64L << 20);
    settings.put(StreamsConfig.consumerPrefix(ConsumerConfig.AUTO_OFFSET_RESET_CONFIG), "earliest");
    settings.put(StreamsConfig.consumerPrefix(ConsumerConfig.MAX_POLL_RECORDS_CONFIG), 5000);
    settings.put(StreamsConfig.consumerPrefix(ConsumerConfig.MAX_PARTITION_FETCH_BYTES_CONFIG), 8 << 20);
    settings.put(StreamsConfig.consumerPrefix(ConsumerConfig.FETCH_MAX_BYTES_CONFIG), 32 << 20);
    settings.put(StreamsConfig.producerPrefix(ProducerConfig.COMPRESSION_TYPE_CONFIG), "lz4");
    settings.put(StreamsConfig.producerPrefix(ProducerConfig.BATCH_SIZE_CONFIG), 256 << 10);
    AtomicLong left = new AtomicLong(messages);
    CountDownLatch over = new CountDownLatch(1);
    var bytes = Serdes.ByteArray();
    Topology topology =
        new Topology()
            .addSource("in", bytes.deserializer(), bytes.deserializer(), topic)
            .addProcessor("machine", () -> new Machine(left, over), "in")
            .addStateStore(
                Stores.keyValueStoreBuilder(Stores.persistentKeyValueStore("rows"), bytes, bytes)
                    .withCachingEnabled(),
                "machine")
            .addSink("out", output, bytes.serializer(), bytes.serializer(), "machine");
    KafkaStreams streams = new KafkaStreams(topology, settings);
    streams.setUncaughtExceptionHandler(
        error -> {
          error.printStackTrace();
          System.exit(1);
          return null;
        });
    streams.start();
    over.await();
    streams.close();
  }

  public static void main(String[] given) throws Exception {
    run(given, given[3], given[8], Long.parseLong(given[6]), given[4] + "/warm");
    Rows.ready();
    run(given, given[2], given[7], Long.parseLong(given[5]), given[4] + "/state");
    Rows.done();
  }
}
