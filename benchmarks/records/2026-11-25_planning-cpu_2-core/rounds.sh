# $1: log; before and now are checkouts of the two commits; CPU seconds (user, system) of each command
: > $1
for round in 1 2 3; do
  for version in before now; do
    cd /tmp/$version; export HOME=/tmp/home_$version PYTHONPATH=/tmp/$version OMP_NUM_THREADS=1; mkdir -p $HOME
    for case in plan refused; do
      [ $case = plan ] && K="" || K="strategies.offload.gpu_memory=1GiB"
      for state in cold warm; do
        [ $state = cold ] && rm -rf $HOME/.cache/deepstow/counts
        TIMEFORMAT="%U %S %R"; t=$( { time python launch/plan.py --config configs/offload.yaml --profile rtx4090-pcie4 $K > /dev/null 2>&1; } 2>&1 )
        echo "round $round $version 7B $case $state user,system,wall: $t" >> $1
      done
    done
  done
done
