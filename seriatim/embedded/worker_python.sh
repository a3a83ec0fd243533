#!/bin/sh
# Spark starts its Python processes by this file where it runs on this host.
#
# Spark puts its own pyspark.zip and a JAR first on PYTHONPATH. Python compiles what it imports from a
# zip in every process, and each task reads the list of files in the JAR again. The installed pyspark
# is the same and is compiled already.
set -f
IFS=:
kept=
for entry in $PYTHONPATH; do
    case $entry in
        */pyspark.zip | */py4j-*.zip | *.jar) ;;
        *) kept=${kept:+$kept:}$entry ;;
    esac
done
# The process that plans the batches of a query may come too late on a busy host: Spark no longer listens
# then, and a run cuts its slices without it. Its stack trace would tell nobody anything. All other errors
# come back over the connection.
case "$*" in
    *python_streaming_source_runner*) exec 2>/dev/null ;;
esac
PYTHONPATH=$kept exec "$SERIATIM_WORKER_PYTHON" "$@"
