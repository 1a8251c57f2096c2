# cov.sh TREE NAME JOBS: coverage of the interpreted suite of TREE into /tmp/cov-NAME.json
tree=$1 name=$2 jobs=$3
mkdir -p /tmp/cov-$name/site; cat > /tmp/cov-$name/rc <<R
[run]
branch = True
parallel = True
data_file = /tmp/cov-$name/data
source = $tree/python/triton_dist/kernels,$tree/python/triton_dist/_tuning
disable_warnings = no-data-collected,module-not-imported,module-not-measured,couldnt-parse
R
echo 'import coverage; coverage.process_startup()' > /tmp/cov-$name/site/sitecustomize.py
cd $tree
export COVERAGE_PROCESS_START=/tmp/cov-$name/rc PYTHONPATH=/tmp/cov-$name/site:$tree/python:$tree:${SITE:-/tmp/site} TRITON_INTERPRET=1 TRITON_DIST_DEVICE=cpu OMP_NUM_THREADS=1 RES_OPTIONS="timeout:1 attempts:1" CUDA_VISIBLE_DEVICES= TRITON_DIST_CACHE_DIR=
unset TRITON_DIST_CACHE_DIR
P=${PY:-python3}
timeout -s INT -k 5 ${LIMIT:-230} $P -m pytest -o addopts= --import-mode=importlib -q -m "not chaos and not stress and not gpu" -p no:cacheprovider -n $jobs --dist load ${PATHS:-tests --ignore=tests/compile --ignore=tests/architecture} >/tmp/cov-$name/log 2>&1
tail -1 /tmp/cov-$name/log
$P -m coverage combine -q --rcfile=/tmp/cov-$name/rc /tmp/cov-$name 2>&1 | tail -1
$P -m coverage json -q --rcfile=/tmp/cov-$name/rc --data-file=/tmp/cov-$name/data -o /tmp/cov-$name.json 2>&1 | tail -1
$P - <<R
import json
d=json.load(open("/tmp/cov-$name.json"))
for part in ("kernels/","_tuning/"):
    fs=[f["summary"] for n,f in d["files"].items() if "triton_dist/"+part in n]
    s=lambda k: sum(f[k] for f in fs)
    print("$name",part,"files",len(fs),"lines",s("covered_lines"),"/",s("num_statements"),round(100*s("covered_lines")/max(1,s("num_statements")),2),"branches",s("covered_branches"),"/",s("num_branches"),round(100*s("covered_branches")/max(1,s("num_branches")),2))
R
