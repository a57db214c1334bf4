#!/run/guest/busybox sh
# The first process of the guest from here on: network, RDMA device, then the command. Its exit code goes to the console.
b=/run/guest/busybox
. /run/guest/settings
export PATH="$REPOSITORY/.venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
export HOME=/root TERM=dumb COLUMNS=140 TMPDIR=/run/tmp PYTHONUNBUFFERED=1 PYTHONPATH="$REPOSITORY"
export FLYBALL_VM FLYBALL_VM_ADDRESSES
export PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 # importing them takes an emulated processor half a minute

die() {
  echo "$NONCE failed: $*"
  $b poweroff -f
}

$b mkdir -p /dev/shm /dev/pts
$b mount -t tmpfs -o size=100% tmpfs /dev/shm # as large as the guest's memory: slots are planned against it
$b mount -t devpts devpts /dev/pts
$b hostname "vm$FLYBALL_VM"
guest=0 # the guests know each other, and themselves, by name: gloo takes a name that it cannot resolve for loopback
for known in $(echo "$FLYBALL_VM_ADDRESSES" | $b tr , ' '); do
  echo "$known vm$guest" >>/etc/hosts
  guest=$((guest + 1))
done
ulimit -l unlimited
ulimit -n 65536

$b ip link set lo up
$b ip link set eth0 mtu 9000 up # room for the largest path MTU of RDMA, 4096
$b ip addr add "$ADDRESS/24" dev eth0
if [ -e /sys/class/net/eth1 ]; then
  # Two interfaces on one network: each answers only for its own address.
  echo 1 >/proc/sys/net/ipv4/conf/all/arp_ignore
  echo 2 >/proc/sys/net/ipv4/conf/all/arp_announce
  $b ip link set eth1 mtu 9000 up
fi
rdma link add rxe0 type rxe netdev eth0 || die "rdma link add"

# The table of GIDs follows the addresses of eth0 a little later. This one names the IPv4 address: ::ffff:10.77.0.N.
waited=0
until $b grep -q "^0000:0000:0000:0000:0000:ffff:" /sys/class/infiniband/rxe0/ports/1/gids/* 2>/dev/null; do
  waited=$((waited + 1))
  [ $waited -le 200 ] || die "no GID of the IPv4 address after 20 s"
  $b usleep 100000
done

# One symbolic link makes Debian's pyverbs importable in the repository's environment; it is written to the tmpfs only.
for packages in "$REPOSITORY"/.venv/lib/python3.*/site-packages; do
  [ -e "$packages/pyverbs" ] || $b ln -s /usr/lib/python3/dist-packages/pyverbs "$packages/pyverbs"
done

echo "$NONCE ready"
cd "$REPOSITORY" || die "no folder $REPOSITORY"
# Through a pipe, since what writes to a terminal writes otherwise.
$b mkfifo /run/guest/output
$b cat /run/guest/output &
printer=$!
/bin/sh -c "$COMMAND" </dev/null >/run/guest/output 2>&1
code=$?
waited=0 # no longer than 2 s: processes that it left behind may hold the pipe open
while kill -0 "$printer" 2>/dev/null && [ $waited -lt 20 ]; do
  waited=$((waited + 1))
  $b usleep 100000
done
echo
echo "$NONCE exit $code"
$b poweroff -f
