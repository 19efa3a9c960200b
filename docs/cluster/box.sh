#!/usr/bin/env bash
# A cluster in one machine: network namespaces are nodes, on a switch of their own, with links of a chosen rate. Needs root;
# iproute2, and for --slurm slurm-wlm and munge, from Debian's packages.
#   sudo bash docs/cluster/box.sh up [--nodes 2] [--rate 800mbit] [--delay 5ms] [--slots 2] [--slurm]
#   sudo bash docs/cluster/box.sh exec 0 mpirun -np 4 build/bin/02_data_parallel     # on node 0; also srun, sbatch, bash
#   sudo bash docs/cluster/box.sh rate 1 80mbit | cut 1 | mend 1                     # node 1's link; gone 1: its processes, too
#   sudo bash docs/cluster/box.sh down                                               # nothing of it is left
# A node has its own network, host name, /tmp and /dev/shm; memory, cores and the other folders are the machine's. Nothing
# in the box can be reached from outside, and it reaches nothing.
set -euo pipefail
box=${TRAIN70B_BOX:-/run/train70b-box} # namespaces have the names BASENAME-0, BASENAME-1, ..., BASENAME-switch
name=$(basename "$box")

refuse() { echo "box.sh: $*" >&2; exit 2; }
[[ $box =~ ^/[A-Za-z0-9/._-]+$ && ! $box =~ ^/(tmp|dev/shm)/ ]] ||
    refuse "TRAIN70B_BOX=$box: must be an absolute path without spaces, outside of /tmp and /dev/shm, which nodes have of their own"
holder() { # the process that keeps node $1
    local pid
    pid=$(cat "$box/$1.pid" 2>/dev/null) && [[ $1 =~ ^[0-9]+$ ]] &&
        [ "$(readlink "/proc/$pid/ns/net")" = "$(cat "$box/$1.net")" ] || # another process may have its number since
        refuse "node $1: there is none (up --nodes N makes nodes 0 to N-1)"
    echo "$pid"
}
add() { # a network namespace of this box
    ip netns add "$1"
    echo "$1" >>"$box/namespaces"
}
on() { # on NODE COMMAND...: in the node's network, host name and mounts, in this folder
    local pid
    pid=$(holder "$1")
    exec nsenter --target "$pid" --net --uts --mount --wd="$PWD" env "${@:2}"
}
shape() { # both directions of node $1's link: at $2 a second, with a queue of at most 50 ms
    [[ $2 =~ ^[1-9][0-9]*[kmg]bit$ ]] || refuse "rate $2: must be like 800mbit"
    local burst=$(($(numfmt --from=si "$(sed 's/bit//; s/[a-z]/\U&/g' <<<"$2")") / 8 / 250 + 16384))
    tc -n "$name-$1" qdisc replace dev eth0 root handle 1: tbf rate "$2" burst "$burst" latency 50ms
    tc -n "$name-switch" qdisc replace dev "port$1" root tbf rate "$2" burst "$burst" latency 50ms
}
late() { # each packet that node $1 sends takes $2 more; $3: root, or after the rate
    # shellcheck disable=SC2086
    tc -n "$name-$1" qdisc add dev eth0 ${3:-root} netem delay "$2" limit 100000 2>/dev/null ||
        refuse "--delay $2: this kernel has no netem (modprobe sch_netem)"
}
slurmd_on() { rm -rf "$box/spool/node$1"; (on "$1" SLURM_CONF="$box/slurm.conf" slurmd -N "node$1" -f "$box/slurm.conf"); }
processes() { ip netns pids "$name-$1" | grep -vx "$(holder "$1")" || true; } # of node $1
stop() {
    local namespace
    [ -e "$box" ] || return 0
    [ -f "$box/namespaces" ] || refuse "$box: is no box"
    while read -r namespace; do
        ip netns pids "$namespace" | xargs -r kill -9 2>/dev/null || true
        ip netns delete "$namespace"
    done <"$box/namespaces"
    rm -rf "$box"
}

start_slurm() {
    local i nodes=$1 slots=$2 tool affinity=none cores
    for tool in munged slurmctld slurmd srun; do
        command -v "$tool" >/dev/null || refuse "--slurm needs $tool (apt install slurm-wlm munge)"
    done
    cores=$(env -u OMP_NUM_THREADS nproc) # all nodes' ranks are bound to the machine's own
    [[ $cores -lt $slots || $cores != $(nproc --all) || $(slurmd -C) != *ThreadsPerCore=1* ]] || affinity=affinity
    mkdir -p "$box"/{spool,log}
    (umask 077 && dd if=/dev/urandom of="$box/munge.key" bs=1024 count=1 status=none)
    cat >"$box/slurm.conf" <<EOF
ClusterName=box
SlurmctldHost=node0
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$box/munge.socket
ProctrackType=proctrack/linuxproc
TaskPlugin=task/$affinity
SelectType=select/cons_tres
SlurmdParameters=config_overrides
MpiDefault=pmix
ReturnToService=2
SchedulerParameters=batch_sched_delay=0
KillWait=5
SlurmdTimeout=6
MessageTimeout=3
StateSaveLocation=$box/spool
SlurmdSpoolDir=$box/spool/%n
SlurmctldPidFile=$box/slurmctld.pid
SlurmdPidFile=$box/slurmd-%n.pid
SlurmctldLogFile=$box/log/slurmctld
SlurmdLogFile=$box/log/slurmd-%n
NodeName=node[0-$((nodes - 1))] CPUs=$slots State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP
EOF
    echo "CgroupPlugin=cgroup/v1" >"$box/cgroup.conf"
    (on 0 munged --force --key-file="$box/munge.key" --socket="$box/munge.socket" --pid-file="$box/munge.pid" \
        --log-file="$box/log/munged" --seed-file="$box/munge.seed")
    (on 0 SLURM_CONF="$box/slurm.conf" slurmctld)
    for ((i = 0; i < nodes; ++i)); do slurmd_on "$i"; done
    for ((i = 0; i < 100; ++i)); do
        [ "$(SLURM_CONF="$box/slurm.conf" nsenter --target "$(holder 0)" --net --uts --mount sinfo -h -t idle -o %D 2>/dev/null)" = "$nodes" ] && return
        sleep 0.2
    done
    refuse "Slurm did not start: $(tail -n 1 "$box/log/slurmctld")"
}

up() {
    local nodes=2 rate='' delay='' slots=2 slurm='' i
    while [ $# -gt 0 ]; do
        case $1 in
        --nodes | --rate | --delay | --slots) [ $# -gt 1 ] || refuse "$1: needs a value"; declare "${1#--}=$2"; shift 2 ;;
        --slurm) slurm=yes; shift ;;
        *) refuse "up $1: unknown (--nodes, --rate, --delay, --slots, --slurm)" ;;
        esac
    done
    [[ $nodes =~ ^[1-9][0-9]?$ ]] || refuse "--nodes $nodes: must be 1 to 99"
    [[ $slots =~ ^[1-9][0-9]*$ ]] || refuse "--slots $slots: must be at least 1"
    [[ $rate =~ ^([1-9][0-9]*[kmg]bit)?$ ]] || refuse "--rate $rate: must be like 800mbit"
    [[ $delay =~ ^([1-9][0-9]*[mu]s)?$ ]] || refuse "--delay $delay: must be like 5ms"
    mkdir "$box" 2>/dev/null || refuse "$box is there already (a box: down first), or cannot be made"
    touch "$box/namespaces"
    trap 'stop; exit 2' ERR
    trap '[ -f "$box/done" ] || stop' EXIT
    add "$name-switch"
    ip -n "$name-switch" link add bridge type bridge
    ip -n "$name-switch" link set bridge up
    echo "127.0.0.1 localhost" >"$box/hosts"
    for ((i = 0; i < nodes; ++i)); do
        echo "10.77.0.$((i + 1)) node$i" >>"$box/hosts"
        echo "node$i slots=$slots" >>"$box/hostfile"
    done
    for ((i = 0; i < nodes; ++i)); do
        add "$name-$i"
        ip -n "$name-switch" link add "port$i" type veth peer name eth0 netns "$name-$i"
        ip -n "$name-switch" link set "port$i" master bridge up
        ip -n "$name-$i" address add "10.77.0.$((i + 1))/24" dev eth0
        ip -n "$name-$i" link set eth0 up
        ip -n "$name-$i" link set lo up
        nsenter --net="/run/netns/$name-$i" unshare --uts --mount bash -c 'hostname node'"$i"' &&
            mount -t tmpfs tmpfs /tmp && mount -t tmpfs tmpfs /dev/shm && mount --bind "'"$box"'/hosts" /etc/hosts &&
            readlink /proc/$$/ns/net > "'"$box"'/'"$i"'.net" && echo $$ > "'"$box"'/'"$i"'.pid" && exec sleep infinity' </dev/null >/dev/null 2>&1 &
        disown
        until [ -s "$box/$i.pid" ]; do kill -0 $! 2>/dev/null || refuse "node $i cannot be made here"; sleep 0.05; done
        [ -z "$rate" ] || shape "$i" "$rate"
        [ -z "$delay" ] || late "$i" "$delay" "${rate:+parent 1:1}"
    done
    cat >"$box/agent" <<EOF
#!/usr/bin/env bash
# What Open MPI calls instead of ssh: agent nodeI COMMAND
node=\${1#node}; shift; exec env TRAIN70B_BOX=$box bash $(printf %q "$(realpath "${BASH_SOURCE[0]}")") exec "\$node" sh -c "\$*"
EOF
    chmod +x "$box/agent"
    [ -z "$slurm" ] || start_slurm "$nodes" "$slots"
    touch "$box/done"
}

command -v ip >/dev/null || refuse "needs iproute2 (apt install iproute2)"
[ "$(id -u)" = 0 ] || refuse "needs root (sudo)"
case ${1:-} in
up) shift; up "$@" ;;
exec)
    [ $# -ge 3 ] || refuse "exec NODE COMMAND..."
    on "$2" SLURM_CONF="$box/slurm.conf" OMPI_MCA_plm_rsh_agent="$box/agent" OMPI_MCA_orte_default_hostfile="$box/hostfile" \
        OMPI_MCA_btl_tcp_if_include=10.77.0.0/24 OMPI_MCA_oob_tcp_if_include=10.77.0.0/24 OMPI_ALLOW_RUN_AS_ROOT=1 \
        OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_hwloc_base_binding_policy=none "${@:3}" ;;
rate) [ $# = 3 ] || refuse "rate NODE RATE"; holder "$2" >/dev/null; shape "$2" "$3" ;;
cut | gone)
    [ $# = 2 ] || refuse "$1 NODE"
    holder "$2" >/dev/null
    [[ "$1 $2" != "gone 0" || ! -f $box/slurm.conf ]] || refuse "gone 0: that node has Slurm's controller"
    ip -n "$name-switch" link set "port$2" down
    [ "$1" = gone ] || exit 0
    processes "$2" | xargs -r kill -9
    (on "$2" sh -c 'mount -t tmpfs tmpfs /tmp && mount -t tmpfs tmpfs /dev/shm') ;; # empty, as after a start
mend)
    [ $# = 2 ] || refuse "mend NODE"
    holder "$2" >/dev/null
    ip -n "$name-switch" link set "port$2" up
    [ ! -f "$box/slurm.conf" ] || [ -n "$(processes "$2" | xargs -r ps -o comm= -p | grep slurmd)" ] || slurmd_on "$2" ;;
down) stop ;;
*) sed -n '2,9s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; [ "${1:-}" = --help ] || exit 2 ;;
esac
