// Lets a build of torch that knows no CUDA take fake tensors on "cuda": to be preloaded, as it stands before torch
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace c10 {
static const Device gpu(DeviceType::CUDA, 0);
struct FakeCudaGuard final : impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  Device exchangeDevice(Device) const override { return gpu; }
  Device getDevice() const override { return gpu; }
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, gpu); }
  Stream exchangeStream(Stream) const noexcept override { return Stream(Stream::DEFAULT, gpu); }
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, FakeCudaGuard)
}  // namespace c10
namespace at {
struct FakeCudaHooks final : CUDAHooksInterface {
  explicit FakeCudaHooks(CUDAHooksArgs) {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
};
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, FakeCudaHooks)
}  // namespace at
