# Steps with weights on a disk, measured and simulated. Run from the root of the repository: bash .../measure.sh FOLDER
# Runs of one folder follow each other: each is planned with the block times of the one before.
here=benchmarks/records/2026-11-29_weights-on-disk_2-core-cpu folder=$1
frozen=benchmarks/records/2026-11-28_frozen-base-on-disk_2-core-cpu/base.yaml
mkdir -p $folder
python launch/doctor.py --rates --disk $folder
run() {  # name, config, overrides
  name=$1 config=$2; shift 2
  echo "--- $name"
  python launch/train.py --config $config training.output_dir=$folder/$name "$@" 2>&1 |
    grep -E "^predicted peak|^simulated step|^on the disk|^step |forward and backward  |a step  |^finished"
}
disk="strategies.offload.disk=$folder strategies.offload.disk_memory=8GiB"
for round in 1 2 3; do run frozen $frozen training.max_steps=12 $disk strategies.offload.host_memory=180MiB; done
run memory $here/trained.yaml
for round in 1 2 3; do run disk $here/trained.yaml $disk strategies.offload.host_memory=450MiB; done
run memory $here/trained.yaml
