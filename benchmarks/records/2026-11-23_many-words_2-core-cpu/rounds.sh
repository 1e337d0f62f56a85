# $1: clone; prints, per model, the least device memory and the simulated step at some budgets
cd $1; export PYTHONPATH=$1 OMP_NUM_THREADS=1
L="model.config.model_type=llama model.config.num_attention_heads=32 model.config.num_key_value_heads=8"
for name in llama2-7b llama3-8b qwen2.5-7b gemma-like-9b; do
  case $name in
    llama2-7b) K="";;
    llama3-8b) K="$L model.config.hidden_size=4096 model.config.intermediate_size=14336 model.config.num_hidden_layers=32 model.config.vocab_size=128256";;
    qwen2.5-7b) K="model.config.model_type=qwen2 model.config.hidden_size=3584 model.config.intermediate_size=18944 model.config.num_hidden_layers=28 model.config.num_attention_heads=28 model.config.num_key_value_heads=4 model.config.vocab_size=152064";;
    gemma-like-9b) K="$L model.config.hidden_size=4096 model.config.intermediate_size=14336 model.config.num_hidden_layers=32 model.config.vocab_size=256000";;
  esac
  for budget in 1 6 8 10 12; do
    echo "$name ${budget}GiB: $(timeout 300 python launch/plan.py --config configs/offload.yaml --profile rtx4090-pcie4 --host-memory 256GiB $K strategies.offload.gpu_memory=${budget}GiB 2>&1 | grep -o "[0-9.]* [GM]iB are needed, [0-9.]* [GM]iB of them for forward and backward\|^simulated step: [0-9.]* s" | head -1)"
  done
done
