#!/bin/sh
# Build the sandbox base image (Debian bookworm with the packages of the Dockerfile beside this) with debootstrap: no
# image registry is needed, only a Debian mirror, and that only once: the tree is cached as a tarball. Idempotent.
# usage: debootstrap.sh [NAME]      import it as an image, by the command docker, unless this recipe's is there
#        debootstrap.sh --tarball   print the tarball, and then what `docker import` is to change, a line each
# TANGRAM_BASE_TOOLS=no leaves out what only agents type (TOOLS in the Dockerfile): 125 MB in place of 430 MB.
set -eu

DOCKERFILE="$(dirname "$(readlink -f "$0")")/Dockerfile"
RECIPE="$(sed -n 's/^# Recipe //p' "$DOCKERFILE")"
if [ "${TANGRAM_BASE_TOOLS:-yes}" = no ]; then WANTED=PACKAGES; else WANTED="PACKAGES\|TOOLS"; fi
PACKAGES="$(sed -n "s/^ARG \($WANTED\)=\"\(.*\)\"\$/\2/p" "$DOCKERFILE" | tr ' \n' ,)"
CHANGES="ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
$(grep -E '^(CMD|ENV) ' "$DOCKERFILE")"
MIRROR="${TANGRAM_DEBIAN_MIRROR:-}" # empty: the default of debootstrap
CACHE="${XDG_CACHE_HOME:-$HOME/.cache}/tangram"
TARBALL="$CACHE/base-bookworm-$(dpkg --print-architecture 2>/dev/null || uname -m)-$RECIPE-${TANGRAM_BASE_TOOLS:-yes}.tar"

say() { printf 'base-image: %s\n' "$*" >&2; }

build_tarball() {
    command -v debootstrap >/dev/null || { say "debootstrap is not installed (Debian: apt-get install debootstrap)"; exit 1; }
    [ "$(id -u)" = 0 ] || { say "debootstrap needs root"; exit 1; }
    tree="$(mktemp -d "${TMPDIR:-/tmp}/tangram-base.XXXXXX")"
    chmod 755 "$tree"
    trap 'rm -rf "$tree" "$TARBALL.$$"' EXIT
    say "building (once, about two minutes; $CACHE/debootstrap.log tells how far it is)"
    # shellcheck disable=SC2086
    debootstrap --variant=minbase --include="$PACKAGES" bookworm "$tree" $MIRROR >"$CACHE/debootstrap.log" 2>&1 ||
        { say "debootstrap failed; the end of $CACHE/debootstrap.log:"; tail -n 5 "$CACHE/debootstrap.log" >&2; exit 1; }
    # What a sandbox never reads: package lists, archives, documentation, translations.
    rm -rf "$tree"/var/cache/apt/* "$tree"/var/lib/apt/lists/* "$tree"/usr/share/doc/* \
        "$tree"/usr/share/man/* "$tree"/usr/share/locale/* "$tree"/usr/share/info/* "$tree"/var/log/* "$tree"/usr/lib/python3*/EXTERNALLY-MANAGED
    ln -sf python3 "$tree/usr/bin/python"
    mkdir -p "$tree/workspace"
    echo 'sandbox:x:1000:1000::/workspace:/bin/sh' >>"$tree/etc/passwd"
    echo 'sandbox:x:1000:' >>"$tree/etc/group"
    chown 1000:1000 "$tree/workspace"
    # Compiled once here instead of at every first import in every sandbox.
    chroot "$tree" python3 -m compileall -q /usr/lib/python3 /usr/lib/python3.11 >/dev/null 2>&1 || true
    tar --numeric-owner --one-file-system -C "$tree" -cf "$TARBALL.$$" .
    mv "$TARBALL.$$" "$TARBALL"
}

NAME="${1:-tangram-base:bookworm}"
MESSAGE="tangram sandbox base, recipe $RECIPE"
[ "$NAME" = --tarball ] || [ "$(docker image inspect --format '{{.Comment}}' "$NAME" 2>/dev/null)" != "$MESSAGE" ] || exit 0
mkdir -p "$CACHE"
[ -f "$TARBALL" ] || build_tarball
if [ "$NAME" = --tarball ]; then
    printf '%s\n%s\n' "$TARBALL" "$CHANGES"
    exit 0
fi
set --
while read -r change; do set -- "$@" --change "$change"; done <<END
$CHANGES
END
docker import "$@" --message "$MESSAGE" "$TARBALL" "$NAME" >/dev/null
say "$NAME is ready ($(docker image inspect --format '{{.Size}}' "$NAME") bytes)"
