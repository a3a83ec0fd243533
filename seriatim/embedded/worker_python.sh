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
PYTHONPATH=$kept exec "$SERIATIM_WORKER_PYTHON" "$@"
