#!/bin/sh
# The Debian packages that some tests need, installed where apt and root are there. Elsewhere those tests are skipped,
# by name. `sh tests/system_packages.sh slow`: also those of the slow tests.
set -eu
PATH="$PATH:/usr/sbin:/sbin"
missing="" slow=""
[ "${1:-}" != slow ] || slow="slurmdbd:slurmdbd mariadbd:mariadb-server-core ch-run:charliecloud sshfs:sshfs psql:postgresql"
for pair in sshd:openssh-server ssh-keygen:openssh-client ip:iproute2 rsync:rsync faketime:faketime chromium:chromium \
    slurmctld:slurmctld slurmd:slurmd sbatch:slurm-client munged:munge $slow; do
    command -v "${pair%%:*}" > /dev/null || missing="$missing ${pair##*:}"
done
[ -n "$missing" ] || exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get > /dev/null; then
    echo "tests of hosts, clusters and pages need$missing; they are skipped"
    exit 0
fi
export DEBIAN_FRONTEND=noninteractive
# shellcheck disable=SC2086
apt-get install -y -q --no-install-recommends $missing > /dev/null 2>&1 || {
    apt-get update -q > /dev/null
    apt-get install -y -q --no-install-recommends $missing > /dev/null
}
