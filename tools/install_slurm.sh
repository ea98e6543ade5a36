#!/usr/bin/env bash
# Installs Slurm for the cluster of the tests from Debian's packages, unless it is installed. Starts no daemon.
set -euo pipefail
missing=0
for program in slurmctld slurmd munged sbatch; do command -v "$program" > /dev/null || missing=1; done
[ "$missing" = 1 ] || exit 0
policy=/usr/sbin/policy-rc.d # with this file, no package starts its daemons
if [ ! -e "$policy" ]; then
  printf '#!/bin/sh\nexit 101\n' > "$policy"
  chmod +x "$policy"
  trap 'rm "$policy"' EXIT
fi
apt-get -q update
DEBIAN_FRONTEND=noninteractive apt-get -q -y install --no-install-recommends slurmctld slurmd slurm-client munge
