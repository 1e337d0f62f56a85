# $1: clone, $2: log, $3: folder of the interpreter
cd $1; export HOME=/tmp/home_$(basename $1) PATH=$3:$PATH OMP_NUM_THREADS=1 PYTHONPATH=$1; mkdir -p $HOME
W="model.config.num_attention_heads=64 model.config.hidden_size=8192 model.config.intermediate_size=28672 model.config.num_hidden_layers=80"
D="model.config.num_attention_heads=16 model.config.hidden_size=1024 model.config.intermediate_size=2816 model.config.num_hidden_layers=400"
: > $2
for round in 1 2 3; do
  for name in 7B 70B 400; do
    case $name in 7B) K="";; 70B) K="$W";; 400) K="$D";; esac
    for state in cold warm; do
      [ $state = cold ] && rm -rf $HOME/.cache/deepstow/counts
      /usr/bin/env time -f "%U %S %e" -o /tmp/t_$(basename $1) python launch/plan.py --config configs/offload.yaml --profile rtx4090-pcie4 $K > /dev/null 2>&1
      echo "round $round $name $state user,system,wall: $(tail -1 /tmp/t_$(basename $1))" >> $2
    done
  done
done
