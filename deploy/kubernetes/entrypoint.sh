#!/bin/bash
# What a container of the image does: `executor` is what Spark asks of an executor's pod, `driver` what an operator
# asks of a driver's pod in cluster mode; anything else is a command of seriatim.
set -euo pipefail

if [ "${1:-}" != executor ] && [ "${1:-}" != driver ]; then
    exec seriatim "$@"
fi

SPARK_HOME=$(python3 -c 'import importlib.util, os; print(os.path.dirname(importlib.util.find_spec("pyspark").origin))')
export SPARK_HOME

if [ "$1" = driver ]; then
    shift
    exec "$SPARK_HOME/bin/spark-submit" --deploy-mode client \
        --conf "spark.driver.bindAddress=${SPARK_DRIVER_BIND_ADDRESS:-0.0.0.0}" "$@"
fi

# Spark hands each of its Java options over in a variable of its own.
java_options=()
while IFS= read -r option; do
    java_options+=("$option")
done < <(env | grep '^SPARK_JAVA_OPT_' | sort --field-separator=_ --key=4 --numeric-sort | sed 's/^[^=]*=//')

exec java "${java_options[@]}" \
    "-Xms$SPARK_EXECUTOR_MEMORY" "-Xmx$SPARK_EXECUTOR_MEMORY" \
    -cp "${SPARK_EXTRA_CLASSPATH:+$SPARK_EXTRA_CLASSPATH:}$SPARK_HOME/jars/*" \
    org.apache.spark.scheduler.cluster.k8s.KubernetesExecutorBackend \
    --driver-url "$SPARK_DRIVER_URL" \
    --executor-id "$SPARK_EXECUTOR_ID" \
    --cores "$SPARK_EXECUTOR_CORES" \
    --app-id "$SPARK_APPLICATION_ID" \
    --hostname "$SPARK_EXECUTOR_POD_IP" \
    --resourceProfileId "$SPARK_RESOURCE_PROFILE_ID" \
    --podName "$SPARK_EXECUTOR_POD_NAME"
