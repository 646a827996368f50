#!/bin/sh
# Trains the draft of SmolLM2-135M-Instruct on a machine that is lent by the call, each call shorter than ten minutes.
#
#     benchmarks/train_smollm2.sh join  GGUF PIECE...              pieces of the 98 MB target file, in order, put together
#     benchmarks/train_smollm2.sh run   WORK TARGET PROMPTS SECONDS [options of eaglecli train ...]
#     benchmarks/train_smollm2.sh pack  WORK RETURN                what comes back: at most 8 files of at most 16 MB
#     benchmarks/train_smollm2.sh unpack WORK RETURN               puts it back in place, here or on a fresh machine
#
# `run` is one command, repeated until it says "complete": first the target's own prompts, then answers, then the training,
# each from where the call before left it. WORK lies on the machine and stays there while the machine is held; SECONDS is
# the length of this call (leave 30 for loading, the last measurement and packing).
# On a fresh machine, `unpack` brings weights and progress back and `run` makes the answers again first (about 5 minutes). The
# optimizer's state (74 MB) stays behind, so the training warms up again over --warmup-steps; the learning rate is that of its step.
#
# A plan for one machine held for half an hour:
#     call 1  join ... && run $W $T $P 500 && pack $W $OUT         prompts and answers (30 M tokens), first steps
#     call 2  run $W $T $P 540 && pack $W $OUT                     the training
#     call 3  run $W $T $P 300 && pack $W $OUT                     its end
# The shipped draft was trained with these options, and with --seconds 430 --max-answer-tokens 39000000 in the call of the training.
# To compare learning rates before: run twice with --retrain --num-steps 150 --learning-rate 5e-4 (2e-3), look at curve.jsonl.
# Give the same options in every call; `--seconds S` makes the cosine end after S seconds of training, whatever the speed.
set -eu
action=$1
shift
case $action in
join)
    target=$1
    shift
    cat "$@" >"$target"
    ;;
run)
    work=$1 target=$2 prompts=$3 seconds=$4
    shift 4
    python3 -m eaglecli train --target "$target" --prompts "$prompts" --output "$work" \
        --self-prompts 60000 --num-samples 2 --low-temperature 0.3 --high-temperature 0.9 --max-new-tokens 384 \
        --max-answer-tokens 54000000 --max-running-requests 512 \
        --draft-vocab-size 11776 --sequence-length 2048 --batch-size 16 --micro-batch-size 16 --num-unroll-steps 7 \
        --epochs 3 --learning-rate 3e-3 --warmup-steps 100 --evaluate-every 800 --checkpoint-every 120 \
        --max-shard-bytes 15000000 --progress plain --stop-after "$seconds" "$@"
    ;;
pack)
    work=$1 back=$2
    mkdir -p "$back"
    (cd "$work" && tar cf - stats.json log.txt $(ls curve.jsonl checkpoint/state.json draft/config.json answers/plan.json 2>/dev/null)) >"$back/small.tar"
    if [ -d "$work/draft" ]; then
        cp "$work"/checkpoint/weights-*.safetensors "$back/"
        split -b 15000000 "$work/draft/model.safetensors" "$back/draft-part-"
    fi
    ls -l "$back"
    ;;
unpack)
    work=$1 back=$2
    mkdir -p "$work/checkpoint" "$work/draft"
    tar xf "$back/small.tar" -C "$work"
    cp "$back"/weights-*.safetensors "$work/checkpoint/"
    cat "$back"/draft-part-* >"$work/draft/model.safetensors"
    ;;
*)
    echo "unknown action $action: join, run, pack or unpack" >&2
    exit 2
    ;;
esac
