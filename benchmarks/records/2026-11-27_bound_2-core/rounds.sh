# $1: log; $2: a folder with checkouts "before" and "now" of the two commits; CPU seconds (user, system) and wall of each command
: > "$1"
plan="--config configs/offload.yaml --profile rtx4090-pcie4"
for case in refused plan; do
  args=$plan
  [ $case = refused ] && args="$plan strategies.offload.gpu_memory=1GiB"
  for version in now before; do
    cd "$2/$version" || exit 1
    export HOME=$2/home_$version PYTHONPATH=$2/$version OMP_NUM_THREADS=1
    mkdir -p "$HOME"
    for state in cold warm; do
      [ $state = cold ] && rm -rf "$HOME/.cache/deepstow/counts"
      TIMEFORMAT="%U %S %R"
      t=$( { time python launch/plan.py $args > /dev/null 2> /dev/null; } 2>&1 )
      echo "$version $case $state user,system,wall: $t; load $(cut -d' ' -f1 /proc/loadavg)" >> "$1"
    done
  done
done
