#!/usr/bin/env bash
# On a machine with a GPU: what it is, parity of every ZeRO stage there, then the quickstart on it.
# Records go to $OUT (default: runs/gpu-check); the short table is printed last.
set -uo pipefail
out=${OUT:-runs/gpu-check}
python=${PYTHON:-python3}
mkdir -p "$out"
"$python" launch/doctor.py --json "$out/doctor.json" | tee "$out/doctor.txt"
for precision in false true; do
  for stage in 0 1 2 3; do
    name="stage $stage, bf16 $precision"
    log="$out/verify-$stage-$precision.txt"
    "$python" launch/verify.py --config configs/quickstart.yaml "strategies.zero.stage=$stage" \
      "training.bf16=$precision" training.max_grad_norm=0 >"$log" 2>&1
    echo "$name: exit $?, $(tail -n 1 "$log")" >>"$out/summary.txt"
  done
done
"$python" launch/train.py --config configs/quickstart.yaml training.bf16=true "training.output_dir=$out/quickstart" \
  >"$out/quickstart.txt" 2>&1
echo "quickstart in bf16: exit $?" >>"$out/summary.txt"
tail -n 12 "$out/quickstart.txt"
cat "$out/summary.txt"
