# First process of a node's pid namespace, in its own network and mount namespaces. What is mounted here
# is seen by this node alone and ends with it, so every program finds its usual paths.
# $1: directory of this node, $2: binaries, $3 and more: kube-proxy's command line, if it shall run.
set -e
node=$1 binaries=$2
shift 2

mount --make-rshared /               # pods may ask for mount propagation
mount --bind "$binaries" "$node/bin"
mount --rbind "$node" /mnt
# What containerd, kubelet and cni keep: a file system in a file. It needs no flushes, since it dies with the
# node, and it is removed at once however many files containers have. Without loop devices, a directory.
truncate --size 16G /mnt/lib.ext4
mkfs.ext4 -q -O ^has_journal -E nodiscard /mnt/lib.ext4
mount -o loop,noatime,nobarrier /mnt/lib.ext4 /var/lib 2>/dev/null || mount --bind /mnt/lib /var/lib
mount --bind /mnt/log /var/log
mount -t tmpfs tmpfs /run            # sockets, pods' namespaces, the lock of iptables
mkdir /run/netns /run/lock
mount -t bpf bpf /sys/fs/bpf
# kubelet wants these values, which are the whole machine's: it reads them here and writes nothing.
for file in /mnt/sysctl/*; do
    mount --bind "$file" "/proc/sys/$(basename "$file" | tr . /)"
done

export PATH="/mnt/bin:$PATH"
cd /
containerd --config /mnt/containerd.toml >/var/log/containerd.log 2>&1 &
until [ -e /mnt/start-kubelet ]; do sleep 0.1; done
kubelet --config /mnt/kubelet.json --kubeconfig /mnt/kubeconfig --hostname-override "$(cat /mnt/name)" \
    --node-ip "$(cat /mnt/addresses)" >/var/log/kubelet.log 2>&1 &
[ $# -eq 0 ] || "$@" >/var/log/kube-proxy.log 2>&1 &
wait
