import java.io.IOException;
import java.nio.charset.StandardCharsets;
import java.util.HashMap;
import org.apache.flink.api.common.eventtime.WatermarkStrategy;
import org.apache.flink.api.common.functions.OpenContext;
import org.apache.flink.api.common.serialization.BulkWriter;
import org.apache.flink.api.common.state.MapState;
import org.apache.flink.api.common.state.MapStateDescriptor;
import org.apache.flink.api.common.typeinfo.TypeInformation;
import org.apache.flink.api.common.typeinfo.Types;
import org.apache.flink.configuration.Configuration;
import org.apache.flink.connector.file.sink.FileSink;
import org.apache.flink.connector.kafka.source.KafkaSource;
import org.apache.flink.connector.kafka.source.enumerator.initializer.OffsetsInitializer;
import org.apache.flink.connector.kafka.source.reader.deserializer.KafkaRecordDeserializationSchema;
import org.apache.flink.core.fs.FSDataOutputStream;
import org.apache.flink.core.fs.Path;
import org.apache.flink.streaming.api.environment.StreamExecutionEnvironment;
import org.apache.flink.streaming.api.functions.KeyedProcessFunction;
import org.apache.flink.util.Collector;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.parquet.hadoop.ParquetWriter;
import org.apache.parquet.hadoop.api.WriteSupport;
import org.apache.parquet.hadoop.metadata.CompressionCodecName;
import org.apache.parquet.io.OutputFile;
import org.apache.parquet.io.PositionOutputStream;
import org.apache.parquet.io.api.Binary;
import org.apache.parquet.io.api.RecordConsumer;
import org.apache.parquet.schema.MessageType;
import org.apache.parquet.schema.MessageTypeParser;

/**
 * Flink: Kafka → keyBy session → rows in keyed map state → Parquet by a file sink, with checkpoints.
 *
 * <p>FlinkPeer hashmap|rocksdb CORES SERVERS TOPIC WARM_TOPIC FOLDER
 */
public class FlinkPeer {
  static final String TOPIC_NAME = "bench-a";
  static final MessageType SCHEMA =
      MessageTypeParser.parseMessageType(
          "message change { required binary topic (UTF8); required int32 partition; required int64 offset;"
              + " required binary session (UTF8); required int64 sequence; required binary op (UTF8);"
              + " required binary id (UTF8); optional double price; optional int64 size;"
              + " optional double old_price; optional int64 old_size; }");

  /** A message on its way to its session's task. */
  public static class Raw {
    public int partition;
    public long offset;
    public String key;
    public byte[] value;

    public Raw() {}
  }

  /** From Kafka's record. */
  public static class Reading implements KafkaRecordDeserializationSchema<Raw> {
    @Override
    public void deserialize(ConsumerRecord<byte[], byte[]> record, Collector<Raw> out) {
      Raw raw = new Raw();
      raw.partition = record.partition();
      raw.offset = record.offset();
      raw.key = new String(record.key(), StandardCharsets.UTF_8);
      raw.value = record.value();
      out.collect(raw);
    }

    @Override
    public TypeInformation<Raw> getProducedType() {
      return TypeInformation.of(Raw.class);
    }
  }

  /** The table, a row to an entry of map state. */
  public static class Machine extends KeyedProcessFunction<String, Raw, Rows.Change> {
    private transient MapState<String, Rows.Row> rows;

    @Override
    public void open(OpenContext context) {
      rows =
          getRuntimeContext()
              .getMapState(new MapStateDescriptor<>("rows", Types.STRING, TypeInformation.of(Rows.Row.class)));
    }

    @Override
    public void processElement(Raw raw, Context context, Collector<Rows.Change> out) throws Exception {
      Rows.Message message = Rows.Message.parse(raw.value);
      if (message.type.equals("snapshot")) {
        rows.clear();
        for (Rows.Row row : message.rows) {
          rows.put(row.id, row);
          out.collect(new Rows.Change(raw.partition, raw.offset, message, row.id, row, null));
        }
        return;
      }
      String id = message.row.id;
      Rows.Row before = rows.get(id);
      if ((before == null) != message.type.equals("insert")) {
        throw new IllegalStateException(message.type + " of " + id + " at " + raw.offset);
      }
      Rows.Row now = message.type.equals("delete") ? null : message.row;
      if (now == null) {
        rows.remove(id);
      } else {
        rows.put(id, now);
      }
      out.collect(new Rows.Change(raw.partition, raw.offset, message, id, now, before));
    }
  }

  /** A record to Parquet's columns, without another library between. */
  static class Columns extends WriteSupport<Rows.Change> {
    private static final Binary TOPIC = Binary.fromString(TOPIC_NAME);
    private RecordConsumer to;

    @Override
    public WriteContext init(org.apache.hadoop.conf.Configuration settings) {
      return new WriteContext(SCHEMA, new HashMap<>());
    }

    @Override
    public void prepareForWrite(RecordConsumer consumer) {
      to = consumer;
    }

    @Override
    public void write(Rows.Change change) {
      to.startMessage();
      field(0, () -> to.addBinary(TOPIC));
      field(1, () -> to.addInteger(change.partition));
      field(2, () -> to.addLong(change.offset));
      field(3, () -> to.addBinary(Binary.fromString(change.session)));
      field(4, () -> to.addLong(change.seq));
      field(5, () -> to.addBinary(Binary.fromString(change.op)));
      field(6, () -> to.addBinary(Binary.fromString(change.id)));
      optional(7, change.price);
      optional(8, change.size);
      optional(9, change.oldPrice);
      optional(10, change.oldSize);
      to.endMessage();
    }

    private void optional(int index, Number value) {
      if (value instanceof Double real) {
        field(index, () -> to.addDouble(real));
      } else if (value instanceof Long whole) {
        field(index, () -> to.addLong(whole));
      }
    }

    private void field(int index, Runnable add) {
      String name = SCHEMA.getFieldName(index);
      to.startField(name, index);
      add.run();
      to.endField(name, index);
    }
  }

  static class Builder extends ParquetWriter.Builder<Rows.Change, Builder> {
    Builder(OutputFile file) {
      super(file);
    }

    @Override
    protected Builder self() {
      return this;
    }

    @Override
    protected WriteSupport<Rows.Change> getWriteSupport(org.apache.hadoop.conf.Configuration settings) {
      return new Columns();
    }
  }

  /** Parquet, zstd, into a stream of Flink's. */
  public static class Parquet implements BulkWriter.Factory<Rows.Change> {
    @Override
    public BulkWriter<Rows.Change> create(FSDataOutputStream stream) throws IOException {
      ParquetWriter<Rows.Change> writer =
          new Builder(new Output(stream)).withCompressionCodec(CompressionCodecName.ZSTD).build();
      return new BulkWriter<>() {
        @Override
        public void addElement(Rows.Change change) throws IOException {
          writer.write(change);
        }

        @Override
        public void flush() {}

        @Override
        public void finish() throws IOException {
          writer.close();
        }
      };
    }
  }

  record Output(FSDataOutputStream stream) implements OutputFile {
    @Override
    public PositionOutputStream create(long block) {
      return new PositionOutputStream() {
        @Override
        public long getPos() throws IOException {
          return stream.getPos();
        }

        @Override
        public void write(int one) throws IOException {
          stream.write(one);
        }

        @Override
        public void write(byte[] bytes, int offset, int length) throws IOException {
          stream.write(bytes, offset, length);
        }

        @Override
        public void flush() throws IOException {
          stream.flush();
        }
      };
    }

    @Override
    public PositionOutputStream createOrOverwrite(long block) {
      return create(block);
    }

    @Override
    public boolean supportsBlockSize() {
      return false;
    }

    @Override
    public long defaultBlockSize() {
      return 0;
    }
  }

  static void run(String[] given, String topic, String folder) throws Exception {
    Configuration settings = new Configuration();
    settings.setString("state.backend.type", given[0]);
    settings.setString("execution.checkpointing.dir", "file://" + folder + "/checkpoints");
    settings.setString("execution.checkpointing.interval", "10s");
    settings.setString("execution.checkpointing.incremental", "true");
    settings.setString("taskmanager.memory.managed.size", "512m");
    settings.setString("taskmanager.memory.network.max", "256m");
    settings.setString("taskmanager.numberOfTaskSlots", given[1]);
    settings.setString("pipeline.object-reuse", "true");
    settings.setString("restart-strategy.type", "none");
    StreamExecutionEnvironment flink =
        StreamExecutionEnvironment.createLocalEnvironment(Integer.parseInt(given[1]), settings);
    KafkaSource<Raw> source =
        KafkaSource.<Raw>builder()
            .setBootstrapServers(given[2])
            .setTopics(topic)
            .setGroupId("flink-" + given[0])
            .setStartingOffsets(OffsetsInitializer.earliest())
            .setBounded(OffsetsInitializer.latest())
            .setDeserializer(new Reading())
            .setProperty("max.poll.records", "5000")
            .setProperty("max.partition.fetch.bytes", "8388608")
            .setProperty("fetch.max.bytes", "33554432")
            .build();
    flink
        .fromSource(source, WatermarkStrategy.noWatermarks(), "kafka")
        .keyBy(raw -> raw.key)
        .process(new Machine())
        .sinkTo(FileSink.forBulkFormat(new Path(folder + "/records"), new Parquet()).build());
    flink.execute();
  }

  public static void main(String[] given) throws Exception {
    run(given, given[4], given[5] + "/warm");
    Rows.ready();
    run(given, given[3], given[5] + "/out");
    Rows.done();
  }
}
