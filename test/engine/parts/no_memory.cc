// A frame whose sender goes away in the middle of it while there is no memory for a copy of its rest: the connection
// ends before that, and nothing else does.
#include <errno.h>
#include <sys/socket.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

#include "network/frame_stream.h"

using namespace ringtrain;

void* operator new[](size_t bytes, const std::nothrow_t&) noexcept {
  constexpr size_t kMost = 1 << 20;
  return bytes > kMost ? nullptr : std::malloc(bytes);
}

int main() {
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends) != 0) return 2;
  FrameStream stream{ByteStream(Descriptor(ends[0]))};
  const Descriptor other(ends[1]);
  auto data = std::make_unique<std::vector<char>>(16 << 20);
  auto frame = std::make_shared<OutgoingFrame>();
  frame->header = {1, 0, data->size()};
  frame->data = data->data();
  stream.send(frame);
  if (!stream.write() || frame->left() == 0) return 3;  // the socket takes a part
  frame->keep_data();
  data.reset();
  if (stream.write() || stream.error() != ENOMEM) return 4;
  std::puts("well");
  return 0;
}
