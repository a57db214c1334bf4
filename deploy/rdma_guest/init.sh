#!/busybox sh
# The first process of the guest, in its initramfs: the host's root, read-only, with the packages laid over it and a tmpfs
# that takes what is written. Busybox is all there is here.
b=/busybox
. /settings

die() {
  echo "$NONCE failed: $*"
  $b poweroff -f
}

$b mkdir -p /proc /sys /dev /written /host /packages /merged
$b mount -t proc proc /proc
$b mount -t sysfs sysfs /sys
$b mount -t devtmpfs devtmpfs /dev
echo "$NONCE kernel"

while read -r module; do
  $b insmod "/modules/$module" || die "insmod $module"
done </modules/order

shared=trans=virtio,version=9p2000.L,msize=512000
$b mount -t tmpfs -o size=75% tmpfs /written
$b mkdir /written/files /written/work
$b mount -t 9p -o "$shared,ro,cache=loose" host /host || die "the host's root cannot be mounted"
$b mount -t 9p -o "$shared,ro,cache=loose" packages /packages || die "the packages cannot be mounted"
$b mount -t overlay -o lowerdir=/packages:/host,upperdir=/written/files,workdir=/written/work overlay /merged ||
  die "the overlay cannot be mounted"
$b mkdir -p /merged/run /merged/out
$b mount -t tmpfs -o size=50% tmpfs /merged/run
$b mount -t 9p -o "$shared,rw,cache=none" out /merged/out || die "/out cannot be mounted"
for folder in proc sys dev; do $b mount -o move "/$folder" "/merged/$folder"; done

$b mkdir -p /merged/run/guest /merged/run/tmp
$b cp /busybox /settings /start.sh /merged/run/guest/
exec $b switch_root /merged /run/guest/busybox sh /run/guest/start.sh
