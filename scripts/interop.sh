#!/usr/bin/env bash
# The tests against other people's consumers of the event stream, and against Mooncake's store. What they need gets a
# virtual environment of its own, .venv-interop, so that it does not decide what sglcache runs with (and pins nothing for
# it): the tests run in .venv and start it from there. Arguments go to pytest.
#   PYTHON=...        the Python to build it from (3.11 or later)
set -euo pipefail
cd "$(dirname "$0")/.."
venv=.venv-interop
python=${PYTHON:-python3}

command -v cc >/dev/null || {
    echo "interop: a C compiler is needed (cc); on Debian and Ubuntu: apt-get install build-essential" >&2
    exit 1
}
for library in libibverbs.so.1 libcurl.so.4 libnuma.so.1; do
    PATH=$PATH:/usr/sbin:/sbin ldconfig -p | grep -F "$library" >/dev/null || {
        echo "interop: Mooncake needs $library; on Debian and Ubuntu: apt-get install libibverbs1 libcurl4 libnuma1" >&2
        exit 1
    }
done
pins() { # pins KEY...: the strings of a list in pyproject.toml, a line each
    .venv/bin/python - "$@" <<'PY'
import sys, tomllib
found = tomllib.load(open("pyproject.toml", "rb"))
for key in sys.argv[1:]:
    found = found[key]
print("\n".join(found))
PY
}
# What is read of SGLang: its event classes, and its token-to-KV allocators.
modules=(disaggregation/kv_events mem_cache/allocator/{base,token,paged})
wanted=$(pins dependency-groups interop; pins tool sglcache interop sglang; echo "${modules[@]}")
if [ "$(cat "$venv/installed" 2>/dev/null)" != "$wanted" ]; then
    "$python" -m venv --clear "$venv"
    pip=("$venv/bin/python" -m pip --disable-pip-version-check)
    echo "interop: $(pins dependency-groups interop | paste -sd ' ')"
    pins dependency-groups interop | "${pip[@]}" install -qq -r /dev/stdin
    # Of SGLang these few modules are read; nothing of it is installed. Its wheel may not be there for this Python and
    # platform: then the tests that need it are skipped, and say so.
    mkdir "$venv/sglang"
    for version in $(pins tool sglcache interop sglang); do
        echo "interop: event classes and allocators of SGLang $version"
        if "${pip[@]}" download -qq --no-deps --only-binary :all: -d "$venv/wheels" "sglang==$version"; then
            for module in "${modules[@]}"; do
                "$venv/bin/python" -c '
import sys, zipfile
sys.stdout.buffer.write(zipfile.ZipFile(sys.argv[1]).read(f"sglang/srt/{sys.argv[2]}.py"))
' "$venv"/wheels/sglang-"$version"-*.whl "$module" >"$venv/sglang/${module##*/}-$version.py"
            done
        fi
        rm -rf "$venv/wheels"
    done
    echo "$wanted" >"$venv/installed"
fi
exec .venv/bin/python -m pytest -m interop tests/interop -n auto --dist worksteal -rs "$@"
