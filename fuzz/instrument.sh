#!/bin/sh
# RUSTC_WRAPPER of `cargo xtask fuzz`: counts coverage in what reads others' bytes. All other crates
# (Arrow and Parquet are most of the build) are compiled as they are. Stable rustc has these flags.
rustc=$1
shift
case " $* " in
*" --crate-name agent "* | *" --crate-name agent_common "* | *" --crate-name fuzz "* | \
    *" --crate-name framehop "* | *" --crate-name gimli "* | *" --crate-name object "*)
    exec "$rustc" "$@" -Cpasses=sancov-module \
        -Cllvm-args=-sanitizer-coverage-level=3 \
        -Cllvm-args=-sanitizer-coverage-inline-8bit-counters \
        -Cllvm-args=-sanitizer-coverage-pc-table \
        -Cllvm-args=-sanitizer-coverage-trace-compares
    ;;
esac
exec "$rustc" "$@"
