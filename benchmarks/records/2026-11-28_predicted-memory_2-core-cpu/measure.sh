# Predicted and measured peak of the process, after step 2 of each run: three rounds, with the C heap as glibc has it, and with
# memory of 128 KiB and more given back at once. Run from the root of the repository; the log is runs.log beside this file.
here=benchmarks/records/2026-11-28_predicted-memory_2-core-cpu
run() {  # name, ranks, config, overrides
  name=$1 ranks=$2 config=$3; shift 3
  for threshold in "" 131072; do
    out=$(mktemp -d)
    said=$(env ${threshold:+MALLOC_MMAP_THRESHOLD_=$threshold} deepspeed --num_gpus $ranks launch/train.py --config $here/$config.yaml training.output_dir=$out/run "$@" 2>&1)
    found=$(grep "process, peak" <<<"$said" | tail -1); say="${found:-$(tail -1 <<<"$said")}"
    echo "$name, heap ${threshold:-as it is}: $say"
    rm -rf $out
  done
}
for round in 1 2 3; do
  echo "round $round, $(git rev-parse --short HEAD), $(date -u +%FT%TZ)"
  run "llama, plain" 1 llama
  run "llama, plain, bf16" 1 llama training.bf16=true
  run "llama, offload streamed" 1 llama 'strategies.offload={site: host, weights: streamed}'
  run "gpt2, plain" 1 gpt2
  run "gpt2, offload" 1 gpt2 'strategies.offload={site: host}'
  run "mixtral, bf16, plain" 1 mixtral
  run "mixtral, bf16, offload with int8 moments" 1 mixtral 'strategies.offload={moments: int8}'
  run "llama, zero 3" 2 llama 'strategies.zero={stage: 3}'
  run "llama, zero 2 with offload" 2 llama 'strategies.zero={stage: 2}' 'strategies.offload={site: host}'
done
