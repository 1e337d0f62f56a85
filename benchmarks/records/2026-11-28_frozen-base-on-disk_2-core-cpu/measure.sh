# A frozen base of LoRA in the host's memory and on the disk, in turns, three rounds; rates of the drive and of this machine
# first. Run from the root of the repository: bash benchmarks/records/2026-11-28_frozen-base-on-disk_2-core-cpu/measure.sh FOLDER
here=benchmarks/records/2026-11-28_frozen-base-on-disk_2-core-cpu folder=$1
mkdir -p $folder
python launch/doctor.py --rates --disk $folder
run() {  # name, overrides
  name=$1; shift
  rm -rf $folder/run
  echo "--- $name"
  python launch/train.py --config $here/base.yaml training.output_dir=$folder/run "$@" 2>&1 |
    grep -E "^predicted peak|^simulated step|^on the disk|^step |process, peak|second|link|^finished|^eval"
}
for round in 1 2 3; do
  echo "=== round $round, $(git rev-parse --short HEAD), $(date -u +%FT%TZ)"
  run "in the host's memory"
  run "on the disk" strategies.offload.disk=$folder strategies.offload.disk_memory=8GiB strategies.offload.host_memory=180MiB
done
