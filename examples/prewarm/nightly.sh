#!/bin/sh
# Keeps a store in step with a folder of documents. In a crontab:
#
#     PATH=/srv/venv/bin:/usr/bin:/bin
#     30 2 * * * CORPUS=/srv/corpus MODEL=/srv/model DARIC_STORE=/srv/kv /srv/nightly.sh
#
# with the environment that daric is installed in first. BUDGET is what the store may
# hold, 32GiB unless set; give the engines that answer as much (disk_bytes).
#
# Documents that vanished are evicted, the others stay whoever makes room (--pin). It
# may be killed at any time; the next night goes on.
set -eu

state="${STATE:-$HOME/.local/state/daric}"
manifest="$state/prewarm.jsonl"
mkdir -p "$state"

prewarm() {
  daric prewarm "$CORPUS" --model "$MODEL" --manifest "$manifest" \
    --budget "${BUDGET:-32GiB}" "$@"
}

code=0
prewarm --sync evict --pin || code=$?
case "$code" in
  0) ;;
  3) echo "some documents could not be stored: see $manifest" >&2 ;;
  4) echo "the store is full: raise BUDGET or evict some" >&2 ;;
  *) exit "$code" ;;
esac
# What is missing or damaged is computed again.
daric prewarm verify "$manifest" || prewarm --again --pin
exit "$code"
