#!/usr/bin/env bash
# Installs Slurm for the cluster of the tests from Debian's packages, unless it is installed. Starts no daemon.
# With the argument --all, it also installs what some slow tests need: the accounting of Slurm, and the server of ssh.
set -euo pipefail
missing=0
programs="slurmctld slurmd munged sbatch"
packages="slurmctld slurmd slurm-client munge"
if [ "${1:-}" = --all ]; then
  programs="$programs slurmdbd mariadbd sshd"
  packages="$packages slurmdbd mariadb-server openssh-server"
fi
for program in $programs; do command -v "$program" > /dev/null || missing=1; done
[ "$missing" = 1 ] || exit 0
policy=/usr/sbin/policy-rc.d # with this file, no package starts its daemons
if [ ! -e "$policy" ]; then
  printf '#!/bin/sh\nexit 101\n' > "$policy"
  chmod +x "$policy"
  trap 'rm "$policy"' EXIT
fi
apt-get -q update
DEBIAN_FRONTEND=noninteractive apt-get -q -y install --no-install-recommends $packages
