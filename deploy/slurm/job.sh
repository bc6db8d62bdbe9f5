#!/bin/bash
# A training job under Slurm: the coordinator and the shards on the first nodes, workers
# on all of them. From an environment in which `psserver` is found, on a file system that
# all nodes share:
#
#   sbatch --nodes=4 --gpus-per-node=8 --export=ALL,PS_PROCESSES=8 job.sh train.py --epochs 3
#
# Variables:
#   PS_FOLDER       state, checkpoints and certificates; by default paramserver-JOBID in
#                   the folder of sbatch
#   PS_CHECKPOINTS  folder or URL of the checkpoints; by default PS_FOLDER/checkpoints
#   PS_SHARDS       shards of the job; 1 by default
#   PS_SHARD_NODES  nodes over which they are spread, the first ones; 1 by default
#   PS_PROCESSES    training processes on each node; 1 by default
#   PS_OPTIONS      what else `psserver coordinator --help` offers, such as
#                   `--mode ssp --checkpoint-every 5min`
#   PS_PLAIN        set it to leave out TLS, on a network that you trust
#
# A job that Slurm puts back into its queue (a lost node, preemption, `scontrol requeue`)
# goes on from its newest checkpoint. 90 s before its time is over it makes a last one and
# asks for its place in the queue itself.

#SBATCH --job-name=paramserver
#SBATCH --ntasks-per-node=1
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=paramserver-%j.log
#SBATCH --signal=B:USR1@90

set -euo pipefail

if [ $# -eq 0 ]; then
    echo 'job.sh: no script to train: sbatch job.sh train.py [ARGUMENTS]' >&2
    exit 2
fi

folder=${PS_FOLDER:-$PWD/paramserver-$SLURM_JOB_ID}
checkpoints=${PS_CHECKPOINTS:-$folder/checkpoints}
shards=${PS_SHARDS:-1}
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
port=$((20000 + SLURM_JOB_ID % 10000))
mkdir -p "$folder"

protection=(--insecure)
if [ -z "${PS_PLAIN:-}" ]; then
    protection=()
    # Those of a start of before are kept, and nodes that are new get theirs.
    psctl tls init "$folder/tls" "${hosts[@]/#/--host=}" >/dev/null
fi

# Runs a command with the certificate of a role.
as() {
    local place=$folder/tls/$1
    if [ -z "${PS_PLAIN:-}" ]; then
        export PS_TLS_CA=$place/ca.pem PS_TLS_CERT=$place/cert.pem PS_TLS_KEY=$place/key.pem
    fi
    exec "${@:2}"
}
export -f as
export folder

nodes=$SLURM_JOB_NUM_NODES
address=${hosts[0]}:$port
# In the batch step: whatever becomes of a step, the coordinator says so.
(as "server-${hosts[0]}" psserver coordinator --listen "$address" \
    --state-dir "$folder/coordinator" --shards "$shards" \
    --min-workers "$((nodes * ${PS_PROCESSES:-1}))" --checkpoint-dir "$checkpoints" \
    "${protection[@]}" ${PS_OPTIONS:-}) &
coordinator=$!

# Each keeps its state under its number, wherever it runs.
shard_hosts=$(IFS=,; echo "${hosts[*]:0:${PS_SHARD_NODES:-1}}")
srun --overlap --nodelist="$shard_hosts" --nodes="${PS_SHARD_NODES:-1}" \
    --ntasks="$shards" --ntasks-per-node="$shards" --kill-on-bad-exit=0 bash -c '
        as "server-$SLURMD_NODENAME" psserver shard --coordinator "$0" \
            --listen "$SLURMD_NODENAME:0" --state-dir "$folder/shard-$SLURM_PROCID" \
            --index "$SLURM_PROCID" "$@"
    ' "$address" "${protection[@]}" &
shards_step=$!

srun --overlap --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 \
    --kill-on-bad-exit=0 bash -c '
        as worker psworker run --coordinator "$0" --worker-id "n$SLURM_PROCID" \
            --nproc "${PS_PROCESSES:-1}" --max-restarts 3 -- "$@"
    ' "$address" "$@" &
workers_step=$!

# The shards must live until the coordinator has its last checkpoint. scancel leaves this
# script itself alone.
stop() {
    kill -TERM "$coordinator" 2>/dev/null || true
    wait "$coordinator" || true
    scancel --signal=TERM "$SLURM_JOB_ID"
    wait || true
}

again() {
    trap '' USR1
    echo 'job.sh: the time is nearly over: a last checkpoint, then back into the queue' >&2
    stop
    scontrol requeue "$SLURM_JOB_ID"
    exit 0
}
trap again USR1

code=0
wait "$workers_step" || code=$?
stop
exit "$code"
