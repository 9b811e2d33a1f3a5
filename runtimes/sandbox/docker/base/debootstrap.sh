#!/bin/sh
# Build the sandbox base image (Debian bookworm with the packages of the Dockerfile beside this) with debootstrap: no
# image registry is needed, only a Debian mirror, and that only once: the tree is cached as a tarball. Idempotent.
# usage: debootstrap.sh [NAME]      import it as an image, by the command docker
#        debootstrap.sh --tarball   print the tarball, and then what `docker import` is to change, a line each
set -eu

RECIPE=1 # raise it when the packages change
DOCKERFILE="$(dirname "$(readlink -f "$0")")/Dockerfile"
PACKAGES="$(sed -n 's/^ARG PACKAGES="\(.*\)"$/\1/p' "$DOCKERFILE" | tr ' ' ,)"
CHANGES="ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
$(grep -E '^(CMD|ENV) ' "$DOCKERFILE")"
MIRROR="${TANGRAM_DEBIAN_MIRROR:-}" # empty: the default of debootstrap
CACHE="${XDG_CACHE_HOME:-$HOME/.cache}/tangram"
TARBALL="$CACHE/base-bookworm-$(dpkg --print-architecture 2>/dev/null || uname -m)-$RECIPE.tar"

say() { printf 'base-image: %s\n' "$*" >&2; }

build_tarball() {
    command -v debootstrap >/dev/null || { say "debootstrap is not installed (Debian: apt-get install debootstrap)"; exit 1; }
    [ "$(id -u)" = 0 ] || { say "debootstrap needs root"; exit 1; }
    tree="$(mktemp -d "${TMPDIR:-/tmp}/tangram-base.XXXXXX")"
    chmod 755 "$tree"
    trap 'rm -rf "$tree" "$TARBALL.$$"' EXIT
    say "building (once, about a minute; $CACHE/debootstrap.log tells how far it is)"
    # shellcheck disable=SC2086
    debootstrap --variant=minbase --include="$PACKAGES" bookworm "$tree" $MIRROR >"$CACHE/debootstrap.log" 2>&1 ||
        { say "debootstrap failed; the end of $CACHE/debootstrap.log:"; tail -n 5 "$CACHE/debootstrap.log" >&2; exit 1; }
    # What a sandbox never reads: package lists, archives, documentation, translations.
    rm -rf "$tree"/var/cache/apt/* "$tree"/var/lib/apt/lists/* "$tree"/usr/share/doc/* \
        "$tree"/usr/share/man/* "$tree"/usr/share/locale/* "$tree"/usr/share/info/* "$tree"/var/log/*
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
[ "$NAME" = --tarball ] || ! docker image inspect "$NAME" >/dev/null 2>&1 || exit 0
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
docker import "$@" --message "tangram sandbox base" "$TARBALL" "$NAME" >/dev/null
say "$NAME is ready ($(docker image inspect --format '{{.Size}}' "$NAME") bytes)"
