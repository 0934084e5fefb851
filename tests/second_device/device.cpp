// A device for torch's PrivateUse1 slot, on the CPU: memory that the host may not read, and streams that run late.
//
// Device memory is mapped twice: where tensors point to, nobody may read or write; kernels use the other mapping. So
// whatever takes a device pointer for a host pointer dies of it. Copies to the host that need not block, events and
// waits are put into a stream's queue, which a thread works off after a delay; all other kernels run on the host, at
// once, after the queue of their stream.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <sys/mman.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>

namespace {

constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr int kNumDevices = 2;

// -- memory -----------------------------------------------------------------------------------------------------------

struct Block {
  char* alias;
  size_t nbytes;
};

std::mutex blocks_lock;
std::map<char*, Block> blocks;

char* allocate(size_t nbytes) {
  size_t rounded = (nbytes + 4095) / 4096 * 4096;
  int fd = memfd_create("device-memory", MFD_CLOEXEC);
  TORCH_CHECK(fd >= 0 && ftruncate(fd, rounded) == 0, "out of device memory");
  void* device = mmap(nullptr, rounded, PROT_NONE, MAP_SHARED, fd, 0);
  void* alias = mmap(nullptr, rounded, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  TORCH_CHECK(device != MAP_FAILED && alias != MAP_FAILED, "out of device memory");
  std::lock_guard<std::mutex> guard(blocks_lock);
  blocks[static_cast<char*>(device)] = {static_cast<char*>(alias), rounded};
  return static_cast<char*>(device);
}

void release(void* pointer) {
  if (pointer == nullptr) return;
  std::lock_guard<std::mutex> guard(blocks_lock);
  auto found = blocks.find(static_cast<char*>(pointer));
  munmap(found->second.alias, found->second.nbytes);
  munmap(pointer, found->second.nbytes);
  blocks.erase(found);
}

char* alias_of(const void* pointer) {
  if (pointer == nullptr) return nullptr;
  std::lock_guard<std::mutex> guard(blocks_lock);
  auto next = blocks.upper_bound(static_cast<char*>(const_cast<void*>(pointer)));
  TORCH_CHECK(next != blocks.begin(), "this is no device memory");
  auto& [begin, block] = *std::prev(next);
  size_t offset = static_cast<const char*>(pointer) - begin;
  TORCH_CHECK(offset <= block.nbytes, "this is no device memory");
  return block.alias + offset;
}

thread_local c10::DeviceIndex current_device = 0;

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    void* data = nbytes ? ::allocate(nbytes) : nullptr;
    return {data, data, &release, c10::Device(kType, current_device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t n) const override {
    std::memcpy(alias_of(to), alias_of(from), n);
  }
};

Allocator allocator;
REGISTER_ALLOCATOR(kType, &allocator);

// -- streams and events -----------------------------------------------------------------------------------------------

std::atomic<int> delay_us{0};

struct Event {
  std::mutex lock;
  std::condition_variable changed;
  // How often it was recorded, and up to which of those the streams have come.
  uint64_t recorded = 0, passed = 0;
  std::chrono::steady_clock::time_point at;

  void pass(uint64_t number) {
    std::lock_guard<std::mutex> guard(lock);
    passed = std::max(passed, number);
    at = std::chrono::steady_clock::now();
    changed.notify_all();
  }
  void wait(uint64_t number) {
    std::unique_lock<std::mutex> guard(lock);
    changed.wait(guard, [&] { return passed >= number; });
  }
};

struct Queue {
  std::mutex lock;
  std::condition_variable changed;
  std::deque<std::function<void()>> work;
  bool busy = false, started = false;

  void put(std::function<void()> task) {
    std::lock_guard<std::mutex> guard(lock);
    work.push_back(std::move(task));
    if (!started) {
      started = true;
      std::thread([this] { run(); }).detach();
    }
    changed.notify_all();
  }
  bool idle() {
    std::lock_guard<std::mutex> guard(lock);
    return work.empty() && !busy;
  }
  void drain() {
    std::unique_lock<std::mutex> guard(lock);
    changed.wait(guard, [&] { return work.empty() && !busy; });
  }

 private:
  void run() {
    std::unique_lock<std::mutex> guard(lock);
    while (true) {
      changed.wait(guard, [&] { return !work.empty(); });
      auto task = std::move(work.front());
      work.pop_front();
      busy = true;
      guard.unlock();
      task();
      guard.lock();
      busy = false;
      changed.notify_all();
    }
  }
};

std::mutex queues_lock;
// Never destroyed: their threads outlive everything.
auto& queues = *new std::map<std::pair<c10::DeviceIndex, c10::StreamId>, std::unique_ptr<Queue>>;
std::atomic<c10::StreamId> next_stream{1};
thread_local c10::StreamId current_stream[kNumDevices] = {0, 0};

Queue& queue_of(c10::DeviceIndex device, c10::StreamId stream) {
  std::lock_guard<std::mutex> guard(queues_lock);
  auto& queue = queues[{device, stream}];
  if (!queue) queue = std::make_unique<Queue>();
  return *queue;
}

Queue& queue_of(const c10::Stream& stream) { return queue_of(stream.device_index(), stream.id()); }

Queue& queue_of_current(c10::DeviceIndex device) { return queue_of(device, current_stream[device]); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device device) const override {
    c10::Device before(kType, current_device);
    current_device = device.index();
    return before;
  }
  c10::Device getDevice() const override { return {kType, current_device}; }
  void setDevice(c10::Device device) const override { current_device = device.index(); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current_device = device.index(); }
  c10::DeviceIndex deviceCount() const noexcept override { return kNumDevices; }
  c10::Stream getStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::UNSAFE, device, current_stream[device.index()]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getNewStream(c10::Device device, int priority) const override {
    return c10::Stream(c10::Stream::UNSAFE, device, next_stream++);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool high) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = getStream(stream.device());
    current_stream[stream.device_index()] = stream.id();
    return before;
  }
  bool queryStream(const c10::Stream& stream) const override { return queue_of(stream).idle(); }
  void synchronizeStream(const c10::Stream& stream) const override { queue_of(stream).drain(); }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    for (c10::StreamId stream = 0; stream < next_stream; ++stream) queue_of(device, stream).drain();
  }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex device, const c10::EventFlag flag)
      const override {
    if (*event == nullptr) *event = new Event;
    auto* found = static_cast<Event*>(*event);
    uint64_t number;
    {
      std::lock_guard<std::mutex> guard(found->lock);
      number = ++found->recorded;
    }
    queue_of(stream).put([found, number] { found->pass(number); });
  }
  void block(void* event, const c10::Stream& stream) const override {
    auto* found = static_cast<Event*>(event);
    uint64_t number;
    {
      std::lock_guard<std::mutex> guard(found->lock);
      number = found->recorded;
    }
    queue_of(stream).put([found, number] { found->wait(number); });
  }
  bool queryEvent(void* event) const override {
    auto* found = static_cast<Event*>(event);
    if (found == nullptr) return true;
    std::lock_guard<std::mutex> guard(found->lock);
    return found->passed >= found->recorded;
  }
  void synchronizeEvent(void* event) const override {
    auto* found = static_cast<Event*>(event);
    found->wait(found->recorded);
  }
  // Not freed: a queue may still pass it.
  void destroyEvent(void* event, const c10::DeviceIndex device) const noexcept override {}
  double elapsedTime(void* first, void* last, const c10::DeviceIndex device) const override {
    auto from = static_cast<Event*>(first)->at, to = static_cast<Event*>(last)->at;
    return std::chrono::duration<double, std::milli>(to - from).count();
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// -- generators -------------------------------------------------------------------------------------------------------

struct GeneratorImpl final : at::CPUGeneratorImpl {
  explicit GeneratorImpl(c10::DeviceIndex device) {
    device_ = c10::Device(kType, device);
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
};

at::Generator& default_generator(c10::DeviceIndex device) {
  static std::vector<at::Generator> all = [] {
    std::vector<at::Generator> made;
    for (int i = 0; i < kNumDevices; ++i) made.push_back(at::make_generator<GeneratorImpl>(i));
    return made;
  }();
  return all[device < 0 ? current_device : device];
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex device) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kNumDevices; }
  void setCurrentDevice(c10::DeviceIndex device) const override { current_device = device; }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override { return std::exchange(current_device, device); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<GeneratorImpl>(device < 0 ? current_device : device);
  }
  at::Allocator* getPinnedMemoryAllocator() const override { return c10::GetAllocator(c10::DeviceType::CPU); }
  bool isPinnedPtr(const void* data) const override { return false; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    auto data = allocator.allocate(nbytes);
    if (storage.data() != nullptr && nbytes)
      std::memcpy(alias_of(data.get()), alias_of(storage.data()), std::min(nbytes, storage.nbytes()));
    storage.set_data_ptr_noswap(std::move(data));
    storage.set_nbytes(nbytes);
  }
};

// -- kernels ----------------------------------------------------------------------------------------------------------

bool on_device(const at::Tensor& tensor) { return tensor.device().type() == kType; }

// The same memory as the device's kernels see it.
at::Tensor seen(const at::Tensor& tensor) {
  if (!on_device(tensor)) return tensor;
  if (tensor.numel() == 0) return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
  auto* base = alias_of(tensor.storage().data()) + tensor.storage_offset() * tensor.itemsize();
  return at::from_blob(base, tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU).requires_grad(false));
}

at::Tensor empty(
    c10::SymIntArrayRef size,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout> layout,
    std::optional<at::Device> device,
    std::optional<bool> pin_memory,
    std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(device.has_value() && device->has_index() ? *device : c10::Device(kType, current_device));
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(sizes, &allocator, keys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::SymIntArrayRef size,
    c10::SymIntArrayRef stride,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout> layout,
    std::optional<at::Device> device,
    std::optional<bool> pin_memory) {
  c10::DeviceGuard guard(device.has_value() && device->has_index() ? *device : c10::Device(kType, current_device));
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &allocator, keys, c10::dtype_or_default(dtype));
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool non_blocking) {
  auto device = on_device(self) ? self.device() : to.device();
  auto& queue = queue_of_current(device.index());
  bool plain = self.dtype() == to.dtype() && self.sizes() == to.sizes() && self.is_contiguous() && to.is_contiguous();
  if (non_blocking && plain && on_device(self) && !on_device(to)) {
    char *from = alias_of(self.storage().data()) + self.storage_offset() * self.itemsize();
    void* target = to.data_ptr();
    size_t nbytes = self.nbytes();
    queue.put([=] {
      std::this_thread::sleep_for(std::chrono::microseconds(delay_us));
      std::memcpy(target, from, nbytes);
    });
    return to;
  }
  queue.drain();
  seen(to).copy_(seen(self));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
  at::native::resize_(to, self.sizes(), std::nullopt);
  return copy_from(self, to, false);
}

at::Scalar local_scalar(const at::Tensor& self) {
  queue_of_current(self.device().index()).drain();
  return seen(self).item();
}

const at::Tensor& resize_(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(size), format);
}

at::Tensor as_strided(
    const at::Tensor& self,
    c10::SymIntArrayRef size,
    c10::SymIntArrayRef stride,
    std::optional<c10::SymInt> offset) {
  std::optional<int64_t> where;
  if (offset.has_value()) where = offset->guard_int(__FILE__, __LINE__);
  return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), where);
}

at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

at::Tensor reshape_alias(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

at::Tensor& set_storage(
    at::Tensor& self,
    at::Storage source,
    c10::SymInt offset,
    c10::SymIntArrayRef size,
    c10::SymIntArrayRef stride) {
  return at::cpu::set_(
      self, source, offset.guard_int(__FILE__, __LINE__), C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

at::Tensor& set_source_storage(at::Tensor& self, at::Storage source) {
  int64_t length = source.nbytes() / self.itemsize();
  return at::cpu::set_(self, source, 0, {length}, {1});
}

at::Tensor& set_source_tensor(at::Tensor& self, const at::Tensor& source) {
  return at::cpu::set_(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

// Numbers are drawn from the device's own generator.
template <typename Draw>
at::Tensor& drawn(at::Tensor& self, std::optional<at::Generator> given, Draw draw) {
  queue_of_current(self.device().index()).drain();
  auto generator = given.has_value() ? *given : default_generator(self.device().index());
  std::lock_guard<std::mutex> guard(generator.mutex());
  auto host = at::detail::createCPUGenerator();
  host.set_state(generator.get_state());
  draw(seen(self), host);
  generator.set_state(host.get_state());
  return self;
}

at::Tensor& bernoulli_(at::Tensor& self, double p, std::optional<at::Generator> g) {
  return drawn(self, g, [&](at::Tensor to, at::Generator& by) { to.bernoulli_(p, by); });
}
at::Tensor& uniform_(at::Tensor& self, double from, double up_to, std::optional<at::Generator> g) {
  return drawn(self, g, [&](at::Tensor to, at::Generator& by) { to.uniform_(from, up_to, by); });
}
at::Tensor& normal_(at::Tensor& self, double mean, double deviation, std::optional<at::Generator> g) {
  return drawn(self, g, [&](at::Tensor to, at::Generator& by) { to.normal_(mean, deviation, by); });
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  for (int device = 0; device < kNumDevices; ++device) queue_of_current(device).drain();
  at::native::cpu_fallback(op, stack);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("resize_", resize_);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Storage", set_source_storage);
  m.impl("set_.source_Tensor", set_source_tensor);
  m.impl("bernoulli_.float", bernoulli_);
  m.impl("uniform_", uniform_);
  m.impl("normal_", normal_);
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  m.def("set_delay_us", [](int value) { delay_us = value; });
  m.def("current_device", [] { return int(current_device); });
  m.def("set_device", [](int device) { current_device = device; });
  m.def("default_generator", [](int device) { return default_generator(device); });
  m.def("get_rng_state", [](int device) { return default_generator(device).get_state(); });
  m.def("set_rng_state", [](int device, at::Tensor state) { default_generator(device).set_state(state); });
  m.def("manual_seed", [](int device, uint64_t seed) { default_generator(device).set_current_seed(seed); });
}
