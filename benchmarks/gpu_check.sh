#!/usr/bin/env bash
# On a machine with a GPU, in parts of at most nine minutes:
#   gpu_check.sh parity | plan | offload-1.3b | offload-6.7b | recompute | recompute-eager | linear
# parity: what the machine is, every ZeRO stage, the memory engine and saved tensors on the host against plain training
# there, the quickstart.
# plan: the machine's rates and block times, then predicted against measured peak and step at three budgets.
# offload-*: our engine against its peers at several tokens per step and budgets.
# recompute (fused attention), recompute-eager (explicit), linear: each against its peers.
# Records go to $OUT (default: runs/gpu-check); the short table is printed last.
set -uo pipefail
part=${1:-parity}
out=${OUT:-runs/gpu-check}
python=${PYTHON:-python3}
mkdir -p "$out"

verify() { # name, then overrides
  local name=$1 log
  shift
  log="$out/verify-${name// /-}.txt"
  "$python" launch/verify.py --config configs/quickstart.yaml training.max_grad_norm=0 "$@" >"$log" 2>&1
  echo "$name: exit $?, $(tail -n 1 "$log")" >>"$out/summary.txt"
}

offload() { # model, rounds, then further options
  local model=$1 rounds=$2 tokens
  shift 2
  for tokens in 2048 4096 8192 16384; do
    "$python" launch/bench.py offload --model "$model" --dtype bf16 --tokens "$tokens" --length 2048 --recompute \
      --rounds "$rounds" --gpu-memory 16GiB,24GiB,40GiB --out "$out/$model-$tokens" "$@" >"$out/$model-$tokens.txt" 2>&1
    { echo "== $model, $tokens tokens per step: exit $?"; tail -n 14 "$out/$model-$tokens.txt"; } >>"$out/summary.txt"
  done
}

planned() { # name, hidden, ffn, layers, heads, then budgets
  local name=$1 shape budget log
  shape=(model.config.hidden_size="$2" model.config.intermediate_size="$3" model.config.num_hidden_layers="$4"
    model.config.num_attention_heads="$5" "model.tokenizer={train: bpe, vocab_size: 4096}" data.path=pydoc)
  shift 5
  for budget in "$@"; do
    log="$out/plan-$name-$budget.txt"
    "$python" launch/train.py --config configs/offload.yaml "${shape[@]}" training.max_steps=6 training.logging_steps=1 \
      "strategies.offload.gpu_memory=$budget" "training.output_dir=$out/run-$name" training.save_strategy=no \
      training.eval_strategy=no >"$log" 2>&1
    { echo "== $name in $budget: exit $?"; grep -E "simulated step|plan against run|predicted .* measured" "$log"; } \
      >>"$out/summary.txt"
    cp "$out/run-$name/plan.json" "$out/plan-$name-$budget.json"
    rm -rf "$out/run-$name/export" "$out/run-$name"/checkpoint-*
  done
}

case $part in
parity)
  "$python" launch/doctor.py --json "$out/doctor.json" | tee "$out/doctor.txt"
  "$python" -m benchmarks.gpu_engine --out "$out/engine" --cases 120 2>&1 | tail -n 30 | tee -a "$out/summary.txt"
  for precision in false true; do
    for stage in 0 1 2 3; do
      verify "stage $stage bf16 $precision" "strategies.zero.stage=$stage" "training.bf16=$precision"
    done
  done
  "$python" launch/train.py --config configs/quickstart.yaml training.bf16=true "training.output_dir=$out/quickstart" \
    >"$out/quickstart.txt" 2>&1
  echo "quickstart in bf16: exit $?" >>"$out/summary.txt"
  tail -n 12 "$out/quickstart.txt"
  ;;
plan)
  "$python" launch/doctor.py --rates | tee -a "$out/summary.txt"
  planned 1.3b 2048 5504 24 16 6GiB 10GiB 24GiB
  planned 6.7b 4096 11008 32 32 12GiB 24GiB 60GiB
  ;;
offload-1.3b) offload 1.3b 2 ;;
offload-6.7b) offload 6.7b 1 --subjects ours-host,ours-streamed,ours-budget,deepspeed-zero2,deepspeed-zero3 ;;
recompute | recompute-eager)
  attention=sdpa
  [ "$part" = recompute ] || attention=eager
  "$python" launch/bench.py recompute --model 1.3b --dtype bf16 --tokens 4096 --attention "$attention" --rounds 3 \
    --subjects plain,ours-selective,ours-selective-host,ours-full,ours-full-host,ours-auto-0,ours-auto-50,\
hf-checkpointing,hf-checkpointing-host,compile-budget-50 \
    --out "$out/recompute-$attention" >"$out/recompute-$attention.txt" 2>&1
  { echo "== recompute, $attention: exit $?"; tail -n 14 "$out/recompute-$attention.txt"; } >>"$out/summary.txt"
  ;;
linear)
  "$python" launch/bench.py linear --dtypes bf16 --tokens 2048,8192 --seconds 0.5 --steps 8 --out "$out/linear" \
    >"$out/linear.txt" 2>&1
  { echo "== linear: exit $?"; tail -n 14 "$out/linear.txt"; } >>"$out/summary.txt"
  ;;
*)
  echo "unknown part '$part': parity, plan, offload-1.3b, offload-6.7b, recompute, recompute-eager or linear" >&2
  exit 2
  ;;
esac
cat "$out/summary.txt"
