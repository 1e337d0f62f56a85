# $1: log; $2: a folder with checkouts "before" and "now" of the two commits; CPU seconds (user, system) of each command
big="model.config.hidden_size=8192 model.config.intermediate_size=28672 model.config.num_hidden_layers=80 model.config.num_attention_heads=64 model.config.num_key_value_heads=8 strategies.offload.gpu_memory=70GiB"
for case in plan refused big; do
  case $case in
    plan) args="--config configs/offload.yaml --profile rtx4090-pcie4" ;;
    refused) args="--config configs/offload.yaml --profile rtx4090-pcie4 strategies.offload.gpu_memory=1GiB" ;;
    big) args="--config configs/offload.yaml --profile h100-sxm-pcie5 --host-memory 2TiB $big" ;;
  esac
  for state in cold warm warm; do
    for version in before now; do
      cd "$2/$version" || exit 1
      export HOME=$2/home_$version PYTHONPATH=$2/$version OMP_NUM_THREADS=1
      mkdir -p "$HOME"
      [ $state = cold ] && rm -rf "$HOME/.cache/deepstow/counts"
      TIMEFORMAT="%U %S"
      t=$( { time python launch/plan.py $args > /dev/null 2> /dev/null; } 2>&1 )
      echo "$version $case $state user,system: $t; load $(cut -d' ' -f1 /proc/loadavg)" >> "$1"
    done
  done
done
