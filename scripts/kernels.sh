#!/bin/sh
# Makes sglcache/testing/kernels.ptx from kernels.cu beside it. Needs nvcc, and ptxas to check it: CUDA 12 or 13.
#
# nvcc writes the newest version of PTX that it knows, which a driver older than nvcc refuses to compile. So the version
# is set to 7.0, with which compute_80 came: every driver since CUDA 11.0 takes that, for every card since Ampere.
set -eu
cd "$(dirname "$0")/../sglcache/testing"
made=$(mktemp)
trap 'rm -f "$made"' EXIT
nvcc -ptx -arch=compute_80 -o "$made" kernels.cu
{
    echo "// Made from kernels.cu by scripts/kernels.sh: nvcc -ptx -arch=compute_80, and .version set to 7.0."
    sed 's/^\.version .*/.version 7.0/' "$made"
} > kernels.ptx
for arch in sm_80 sm_86 sm_89 sm_90 sm_100 sm_120; do
    ptxas -arch=$arch -o /dev/null kernels.ptx
done
