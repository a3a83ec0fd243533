import org.apache.spark.sql.SparkSession
import org.apache.spark.sql.streaming.{GroupState, GroupStateTimeout, OutputMode, Trigger}
import scala.collection.mutable
import scala.jdk.CollectionConverters._

case class Raw(key: Array[Byte], value: Array[Byte], partition: Int, offset: Long)
case class Row(price: Double, size: Long)
case class Table(rows: Map[String, Row])
case class Change(
    partition: Int, offset: Long, session: String, sequence: Long, op: String, id: String,
    price: Option[Double], size: Option[Long], old_price: Option[Double], old_size: Option[Long])

/** Spark's own way in Scala: flatMapGroupsWithState, with the sort by offset that makes it right.
  *
  * SparkPeer SERVERS TOPIC WARM_TOPIC FOLDER MESSAGES_AT_ONCE
  */
object SparkPeer {
  def fold(session: String, messages: Iterator[Raw], state: GroupState[Table]): Iterator[Change] = {
    val rows = mutable.HashMap.from(state.getOption.fold(Map.empty[String, Row])(_.rows))
    val changes = new mutable.ArrayBuffer[Change]
    messages.toArray.sortBy(_.offset).foreach(apply(rows, _, changes))
    state.update(Table(rows.toMap))
    changes.iterator
  }

  def apply(rows: mutable.HashMap[String, Row], raw: Raw, changes: mutable.ArrayBuffer[Change]): Unit = {
    val message = Rows.Message.parse(raw.value)
    def emit(id: String, now: Option[Row], old: Option[Row]): Unit = changes += Change(
      raw.partition, raw.offset, message.session, message.seq, message.`type`, id,
      now.map(_.price), now.map(_.size), old.map(_.price), old.map(_.size))
    if (message.`type` == "snapshot") {
      rows.clear()
      for (row <- message.rows.asScala) {
        rows(row.id) = Row(row.price, row.size)
        emit(row.id, rows.get(row.id), None)
      }
    } else {
      val id = message.row.id
      val old = rows.get(id)
      require(old.isEmpty == (message.`type` == "insert"), s"${message.`type`} of $id")
      val now = if (message.`type` == "delete") None else Some(Row(message.row.price, message.row.size))
      now.fold(rows -= id)(row => rows += id -> row)
      emit(id, now, old)
    }
  }

  def run(spark: SparkSession, given: Array[String], topic: String, folder: String): Unit = {
    import spark.implicits._
    spark.readStream.format("kafka")
      .option("kafka.bootstrap.servers", given(0)).option("subscribe", topic).option("startingOffsets", "earliest")
      .option("maxOffsetsPerTrigger", given(4)).option("kafka.max.poll.records", "5000")
      .option("kafka.max.partition.fetch.bytes", "8388608").option("kafka.fetch.max.bytes", "33554432")
      .load().select("key", "value", "partition", "offset").as[Raw]
      .groupByKey(raw => new String(raw.key, "UTF-8"))
      .flatMapGroupsWithState(OutputMode.Append, GroupStateTimeout.NoTimeout)(fold)
      .writeStream.format("parquet").option("path", s"$folder/records").option("checkpointLocation", s"$folder/checkpoint")
      .trigger(Trigger.AvailableNow()).start().awaitTermination()
  }

  def main(given: Array[String]): Unit = {
    val spark = SparkSession.builder.getOrCreate()
    run(spark, given, given(2), given(3) + "/warm")
    Rows.ready()
    run(spark, given, given(1), given(3) + "/out")
    Rows.done()
  }
}
