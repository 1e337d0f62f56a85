#!/bin/bash
# 150 steps of configs/tensor.yaml on two ranks, for each exchange and seed, in turn; OUT gets the logs
export OMP_NUM_THREADS=1
OUT=$1
for SEED in 0 1 2; do
  for HOW in "none" "{tokens: 0.5, bits: 8}" "{tokens: 0.25, bits: 4}" "{tokens: 0.5, bits: 4}" "{tokens: 0.25, bits: 8}" "{tokens: 1, bits: 4}" "{tokens: 1, bits: 4, codec: segmented}"; do
    NAME=$(echo "$HOW seed $SEED" | tr -d '{}:,' | tr ' ' '-')
    MORE=(); [ "$HOW" = none ] || MORE=("strategies.tensor.exchange=$HOW")
    nice -n 19 torchrun --master_port 29631 --nproc_per_node 2 launch/train.py --config configs/tensor.yaml training.output_dir=$OUT/runs/$NAME \
      training.per_device_train_batch_size=2 training.max_steps=150 training.use_cpu=true training.save_strategy=no training.eval_strategy=no \
      training.seed=$SEED "${MORE[@]}" > $OUT/$NAME.log 2>&1
  done
done
